"""What the package says unasked: a warning, and one line about what was applied."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from .report import Report, te_name
from .settings import COMMAND
from .state import State

PLACEHOLDER = "https://example.invalid/"
"""An address in the metadata that is none yet."""
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_BAD = (State.UNRECOGNIZED, State.FAILED)
_NAMED = 5
"""As many fixes are named in a message, more are counted."""
_SAID_BY = "_TE_GRAPH_FIXES_SAID_BY"
"""The process that has said what was applied: workers that it spawns do not say it again."""
_logger = logging.getLogger("te_graph_fixes")
_said: set[str] = set()


def rank() -> str | None:
    """The rank of this process, as its launcher names it."""
    return next((os.environ[name] for name in _RANKS if os.environ.get(name)), None)


def problem_summary(report: Report, strict: bool) -> str:
    """What is wrong: first what to do, then a line for each reason with the fixes that have it; "" if nothing is."""
    bad, te = report.having(*_BAD), te_name(report.te_version)
    early = max((fix.earlier_graphs for fix in report.fixes.values()), default=0)
    go_on = "to go on without a fix, name it in TE_GRAPH_FIXES_DISABLE or set TE_GRAPH_FIXES_STRICT=0"
    all_of_it = "te_graph_fixes.report() has all of it"
    advice = f"Switch graphs off; {go_on}" if strict else f"Stop the job or switch graphs off; {all_of_it}"
    lines = []
    if bad:
        lines = [
            f"{te}: {_count(len(bad), 'fix')} that it needs cannot be applied, so its graphs may give wrong gradients. "
            f"{advice}; {how_to_report()}"
        ]
        lines += [f"{named(fixes)}: {reason}" for reason, fixes in _by_value(bad).items()]
    if early:
        lines.append(
            f"{te}: {_count(early, 'graph')} captured before the fixes were in place will stay without them and may "
            "give wrong gradients: import te_graph_fixes before graphs are captured"
        )
    return "\n  ".join(lines)


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
    return f"`{COMMAND} issue` prints what {report}"


def announce(report: Report, verbose: bool | None) -> None:
    """Say once what was applied: to a log that takes it, or else on stderr; unless ``verbose``, on the first rank."""
    text = _in_short(report, bool(verbose))
    wanted = verbose
    if verbose is None:
        is_first = rank() in (None, "0") and not _is_worker()
        wanted = is_first and len(report.having(State.DISABLED)) < len(report.fixes)
    if text in _said or not wanted:
        return
    _said.add(text)
    os.environ[_SAID_BY] = str(os.getpid())
    if verbose is None and _logger.isEnabledFor(logging.INFO) and _logger.hasHandlers():
        _logger.info("%s", text)
    else:
        where = f", rank {rank()}" if rank() else ""
        print(f"te-graph-fixes {report.version}{where}: {text}", file=sys.stderr, flush=True)


def _is_worker() -> bool:
    """Whether `multiprocessing` has started this process, from one that has said what was applied."""
    multiprocessing = sys.modules.get("multiprocessing")  # where it is not imported, it has started nothing
    parent = multiprocessing.parent_process() if multiprocessing else None
    return parent is not None and os.environ.get(_SAID_BY) == str(parent.pid)


def _in_short(report: Report, everything: bool) -> str:
    """How many fixes are applied, or why none is, and which are missing; on demand ``everything`` by its status."""
    te, count = te_name(report.te_version), len(report.having(State.APPLIED))
    on_disk = [reason for reason in report.having(State.NOT_NEEDED).values() if reason.startswith("corrected on disk")]
    if count:
        text = f"{_count(count, 'fix')} applied to {te}"
    elif on_disk:
        text = f"{te} has {len(on_disk)} fixes, {on_disk[0]}"
    else:
        text = f"no fix applied to {te}"
    for word, fixes in (("missing", report.having(*_BAD)), ("left out", report.having(State.DISABLED))):
        text += f"; {word}: {named(list(fixes))}" if fixes else ""
    if everything:
        words = _by_value({fix_id: str(status.status) for fix_id, status in report.fixes.items()})
        text += " (" + "; ".join(f"{word}: {', '.join(ids)}" for word, ids in sorted(words.items())) + ")"
    return "; ".join([text, *report.said_of_copies()])


def _count(number: int, what: str) -> str:
    plural = {"fix": "fixes"}.get(what, f"{what}s")
    return f"{number} {what if number == 1 else plural}"


def named(fixes: Sequence[str]) -> str:
    """The fixes by their names if they are few, or else their number."""
    return ", ".join(fixes) if len(fixes) <= _NAMED else _count(len(fixes), "fix")


def _by_value(items: dict[str, str]) -> dict[str, list[str]]:
    """Each value with all its keys."""
    keys: dict[str, list[str]] = {}
    for key, value in items.items():
        keys.setdefault(value, []).append(key)
    return keys
