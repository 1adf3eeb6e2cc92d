"""What the package says unasked: a warning that points at the user's line, and one line about what was applied."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from types import FrameType

from .report import Report, TEGraphFixesWarning, te_name

PLACEHOLDER = "https://example.invalid/"
"""An address in the metadata that is none yet."""
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_NOT_THE_USERS = ("te_graph_fixes", "importlib", "_frozen_importlib", "transformer_engine", "sitecustomize")
_BAD = ("unrecognized", "failed")
_NAMED = 5
"""As many fixes are named in a message, more are counted."""
_logger = logging.getLogger("te_graph_fixes")
_said: set[str] = set()


def rank() -> str | None:
    """The rank of this process, as its launcher names it."""
    return next((os.environ[name] for name in _RANKS if os.environ.get(name)), None)


def problem_summary(report: Report, early: int) -> str:
    """What is wrong, in one sentence or two, fixes with one reason together; "" if nothing is.

    ``early`` is the number of graphs that were captured before.
    """
    bad = report.having(*_BAD)
    if len(bad) > _NAMED:
        said = [f"{len(bad)} of {len(report.having(*_BAD, 'applied'))} fixes that are needed cannot be applied"]
    else:
        said = [f"{fixes} cannot be applied: {reason}" for reason, fixes in _groups(bad).items()]
    if early:
        said.append(
            f"{early} graph{'s' * (early > 1)} captured before the fixes were in place will stay without them: import "
            "te_graph_fixes before graphs are captured"
        )
    if not said:
        return ""
    text = f"{te_name(report.te_version)}: {'; '.join(said)}. Its graphs may give wrong gradients"
    return f"{text}: stop the job or switch graphs off; {how_to_report()}" if bad else text


def issues() -> str:
    """Where reports go; "" where the package was put in place without its metadata, or has no address yet."""
    from importlib.metadata import PackageNotFoundError, metadata  # slow to import

    try:
        urls = metadata("te-graph-fixes").get_all("Project-URL") or []
    except PackageNotFoundError:
        return ""
    url = next((url.partition(", ")[2] for url in urls if url.startswith("Issues, ")), "")
    return "" if url.startswith(PLACEHOLDER) else url


def how_to_report() -> str:
    """What to do about a TransformerEngine that is not recognized."""
    where = issues()
    report = f"a report at {where} needs" if where else "whoever gave you the package needs to know"
    return f"`te-graph-fixes issue` prints what {report}"


def warn(text: str) -> None:
    """Warn, once a process for each text, at the line outside of this package, TE and the import system."""
    if text in _said:
        return
    frame: FrameType = sys._getframe()
    while frame.f_back and (
        _module(frame).partition(".")[0] in _NOT_THE_USERS or "exec_module" in frame.f_code.co_name  # a tool's loader
    ):
        frame = frame.f_back
    warnings.warn_explicit(text, TEGraphFixesWarning, frame.f_code.co_filename, frame.f_lineno, _module(frame))
    _said.add(text)


def announce(report: Report, verbose: bool | None) -> None:
    """Say once what was applied: to a log that takes it, or else on stderr; unless ``verbose``, on the first rank."""
    text = _in_short(report, bool(verbose))
    wanted = verbose
    if verbose is None:
        wanted = rank() in (None, "0") and len(report.having("disabled")) < len(report.fixes)
    if text in _said or not wanted:
        return
    _said.add(text)
    if verbose is None and _logger.isEnabledFor(logging.INFO) and _logger.hasHandlers():
        _logger.info("%s", text)
    else:
        where = f", rank {rank()}" if rank() else ""
        print(f"te-graph-fixes {report.version}{where}: {text}", file=sys.stderr, flush=True)


def _in_short(report: Report, everything: bool) -> str:
    """How many fixes are applied, or why none is, and which are missing; on demand ``everything`` by its status."""
    te, count = te_name(report.te_version), len(report.having("applied"))
    on_disk = [reason for reason in report.having("not-needed").values() if reason.startswith("corrected on disk")]
    if count:
        text = f"{count} fix{'es' * (count > 1)} applied to {te}"
    elif on_disk:
        text = f"{te} has {len(on_disk)} fixes, {on_disk[0]}"
    else:
        text = f"no fix applied to {te}"
    for word, names in (("missing", report.having(*_BAD)), ("left out", report.having("disabled"))):
        text += f"; {word}: {', '.join(names) if len(names) <= _NAMED else len(names)}" if names else ""
    if everything:
        words = _groups({fix_id: status.status for fix_id, status in report.fixes.items()})
        text += f" ({'; '.join(f'{word}: {ids}' for word, ids in sorted(words.items()))})"
    return "; ".join([text, *report.said_of_copies()])


def _groups(items: dict[str, str]) -> dict[str, str]:
    """Each value with a list of all its keys."""
    found: dict[str, list[str]] = {}
    for key, value in items.items():
        found.setdefault(value, []).append(key)
    return {value: ", ".join(keys) for value, keys in found.items()}


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
