"""What the package says unasked: a warning that points at the user's line, and one line about what was applied."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from types import FrameType

from .status import Report, TEGraphFixesWarning

_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_NOT_THE_USERS = ("te_graph_fixes", "importlib", "_frozen_importlib", "transformer_engine", "sitecustomize")
_BAD = ("unrecognized", "failed")
_logger = logging.getLogger("te_graph_fixes")
_said: set[str] = set()


def rank() -> str | None:
    """The rank of this process, as its launcher names it."""
    return next((os.environ[name] for name in _RANKS if os.environ.get(name)), None)


def complaint(report: Report, early: int) -> str:
    """What is wrong, in one sentence or two, fixes with one reason together; "" if nothing is.

    ``early`` is the number of graphs that were captured before.
    """
    bad = {fix_id: status.reason for fix_id, status in report.fixes.items() if status.status in _BAD}
    said = [f"{fixes} cannot be applied: {reason}" for reason, fixes in _groups(bad).items()]
    if early:
        said.append(
            f"{early} graphs were captured before the fixes were in place and stay as they are; import te_graph_fixes "
            "before they are captured"
        )
    return (
        f"TransformerEngine {_version(report)}: {'; '.join(said)}. Its graphs may give wrong gradients" if said else ""
    )


def warn(text: str) -> None:
    """Warn, once a process for each text, at the line outside of this package, TE and the import system."""
    if text in _said:
        return
    frame: FrameType = sys._getframe()
    while frame.f_back and (
        _module(frame).partition(".")[0] in _NOT_THE_USERS or "exec_module" in frame.f_code.co_name  # a tool's loader
    ):
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    place = frame.f_code.co_filename, frame.f_lineno, _module(frame)
    warnings.warn_explicit(text, TEGraphFixesWarning, *place, registry)
    _said.add(text)


def announce(report: Report, verbose: bool | None) -> None:
    """Say once what was applied: to a log that takes it, or else on stderr; unless ``verbose``, on the first rank."""
    words = _groups({fix_id: status.status for fix_id, status in report.fixes.items()})
    text = f"TransformerEngine {_version(report)}: {'; '.join(f'{word}: {ids}' for word, ids in sorted(words.items()))}"
    if text in _said or not (rank() in (None, "0") and set(words) != {"disabled"} if verbose is None else verbose):
        return
    _said.add(text)
    if verbose is None and _logger.isEnabledFor(logging.INFO) and _logger.hasHandlers():
        _logger.info("%s", text)
    else:
        where = f", rank {rank()}" if rank() else ""
        print(f"te-graph-fixes {report.version}{where}: {text}", file=sys.stderr, flush=True)


def _groups(items: dict[str, str]) -> dict[str, str]:
    """Each value with a list of all its keys."""
    found: dict[str, list[str]] = {}
    for key, value in items.items():
        found.setdefault(value, []).append(key)
    return {value: ", ".join(keys) for value, keys in found.items()}


def _version(report: Report) -> str:
    return report.te_version or "(unknown version)"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
