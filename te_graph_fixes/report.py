"""The status of every fix, and what the package says unasked: a warning, and one line about what was applied."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

from .settings import COMMAND, DISABLE, STRICT, rank
from .status import ON_DISK, REFUSED, Status
from .version import __version__

COPIED = "_make_graphed_callables"
"""A function of TransformerEngine's graph.py, by which a copy of it is known."""
_NAMED = 5
"""As many fixes are named in a message, more are counted."""
_logger = logging.getLogger("te_graph_fixes")
_said: set[str] = set()


class FixNotAppliedError(RuntimeError):
    """Strict mode: a fix that the installed TransformerEngine needs cannot be applied."""


class TEGraphFixesWarning(UserWarning):
    """Without strict mode: graphs may be wrong, or a setting has no effect. The text says what to do."""


@dataclass(frozen=True)
class FixStatus:
    """What became of one fix: its ``status``, the ``reason``, upstream's links, and the modules that it changes.

    ``status`` is a `te_graph_fixes.status.Status`, a string, and never ``applicable``. ``earlier_graphs`` counts
    the graphs without an applied fix: they were captured before it was in place.
    """

    status: Status
    reason: str
    upstream: tuple[str, ...]
    targets: tuple[str, ...]
    earlier_graphs: int = 0


@dataclass(frozen=True)
class Report:
    """The `FixStatus` of every fix, by its id; ``str`` makes a table of it.

    ``te_version`` is None where TransformerEngine is not found, or has no metadata. ``version`` is that of
    te-graph-fixes. ``copies`` names the modules that held a copy of TransformerEngine's graph.py when it was imported:
    no fix reaches their graphs.
    """

    te_version: str | None
    fixes: dict[str, FixStatus]
    version: str = __version__
    copies: tuple[str, ...] = ()

    def __str__(self) -> str:
        width = max(map(len, self.fixes), default=0)
        lines = [f"te-graph-fixes {self.version}, {te_name(self.te_version)}"]
        for fix_id, fix in self.fixes.items():
            earlier = f" (not in {_count(fix.earlier_graphs, 'graph')} captured before)" if fix.earlier_graphs else ""
            lines.append(f"  {fix_id:{width}}  {fix.status:14}  {fix.reason}{earlier}")
        return "\n".join([*lines, *(f"  {text}" for text in self.said_of_copies())])

    def said_of_copies(self) -> list[str]:
        """A sentence for each copy of TransformerEngine's graphs."""
        return [f"{name} is a copy of TransformerEngine's graph.py: no fix reaches its graphs" for name in self.copies]

    def having(self, *statuses: str) -> dict[str, str]:
        """The reasons of the fixes with one of these statuses."""
        return {fix_id: fix.reason for fix_id, fix in self.fixes.items() if fix.status in statuses}

    def as_dict(self) -> dict[str, Any]:
        """The same as plain dicts and lists, ready for JSON."""
        import json  # slow to import

        plain = json.loads(json.dumps(asdict(self)))
        return {"te_graph_fixes_version": plain.pop("version"), **plain}


def copies_of_graphs(original: str) -> tuple[str, ...]:
    """The imported modules, except the one called ``original``, that define `COPIED`."""
    copies = []
    for name, module in list(sys.modules.items()):
        is_module = issubclass(type(module), ModuleType)
        own = object.__getattribute__(module, "__dict__") if is_module else {}  # loads nothing
        if name != original and getattr(own.get(COPIED), "__module__", None) == name:
            copies.append(name)
    return tuple(sorted(copies))


def problem_summary(report: Report) -> str:
    """What is wrong: first what to do, then a line for each reason with the fixes that have it; "" if nothing is."""
    bad, te = report.having(*REFUSED), te_name(report.te_version)
    early = max((fix.earlier_graphs for fix in report.fixes.values()), default=0)
    lines = []
    if bad:
        lines = [
            f"stop the job, or switch the graphs of {te} off: {_count(len(bad), 'fix')} that it needs cannot be "
            f"applied, so they may give wrong gradients. To go on without a fix, name it in {DISABLE} (without all of "
            f"these: {STRICT}=0). te_graph_fixes.report() has all of it; `{COMMAND} issue` prints what a report needs"
        ]
        lines += [f"{named(ids)}: {reason}" for reason, ids in by_reason(bad).items()]
    if early:
        lines.append(
            f"import te_graph_fixes before graphs are captured: {_count(early, 'graph')} of {te} captured before the "
            "fixes were in place will stay without them and may give wrong gradients"
        )
    return "\n  ".join(lines)


def announce(report: Report, verbose: bool | None) -> None:
    """Say once what was applied: to a log that takes it, or else on stderr; unless ``verbose``, on the first rank.

    Workers of `multiprocessing`, as those of a DataLoader, are daemons. They would say it again.
    """
    from multiprocessing import current_process  # slow to import, but for torch

    text, wanted = _summary(report), verbose
    if verbose is None:
        is_first = rank() in (None, "0") and not current_process().daemon
        wanted = is_first and len(report.having(Status.DISABLED)) < len(report.fixes)
    if text in _said or not wanted:
        return
    _said.add(text)
    if verbose is None and _logger.isEnabledFor(logging.INFO) and _logger.hasHandlers():
        _logger.info("%s", text)
    else:
        where = f", rank {rank()}" if rank() else ""
        print(f"te-graph-fixes {report.version}{where}: {text}", file=sys.stderr, flush=True)


def _summary(report: Report) -> str:
    """How many fixes are applied, or why none is, and which are missing or left out."""
    te, count = te_name(report.te_version), len(report.having(Status.APPLIED))
    on_disk = [reason for reason in report.having(Status.NOT_NEEDED).values() if reason.startswith(ON_DISK)]
    if count:
        text = f"{_count(count, 'fix')} applied to {te}"
    elif on_disk:
        text = f"{te} has {_count(len(on_disk), 'fix')}, {on_disk[0]}"
    else:
        text = f"no fix applied to {te}"
    for word, ids in (("missing", report.having(*REFUSED)), ("left out", report.having(Status.DISABLED))):
        text += f"; {word}: {named(list(ids))}" if ids else ""
    return "; ".join([text, *report.said_of_copies()])


def te_name(version: str | None) -> str:
    """TransformerEngine with its version."""
    return f"TransformerEngine {version or '(version unknown)'}"


def by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """The reasons of fixes, each with all the fixes that have it."""
    fixes: dict[str, list[str]] = {}
    for fix_id, reason in reasons.items():
        fixes.setdefault(reason, []).append(fix_id)
    return fixes


def named(fixes: Sequence[str]) -> str:
    """The fixes by their names if they are few, or else their number."""
    return ", ".join(fixes) if len(fixes) <= _NAMED else _count(len(fixes), "fix")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun == 'fix' else 's'}"
