"""The report on this process: the status of every fix, as a table or a warning."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .settings import DISABLE, STRICT
from .status import BAKED, CANNOT_APPLY, Status
from .version import __version__

_MOST_NAMED = 5
"""A message names up to this number of fixes. If there are more, it contains only their number."""
_BELOW = ("te_graph_fixes", "te_graph_fixes_run", "transformer_engine", "torch", "wrapt", "importlib")
"""The packages whose frames `warn_once` skips to find the line in the user's program."""
_printed: set[str] = set()


class FixNotAppliedError(RuntimeError):
    """The error of strict mode: a fix that the installed TransformerEngine needs cannot be applied."""


class TEGraphFixesWarning(UserWarning):
    """A warning that graphs may be wrong, or that a setting has no effect. The message contains the remedy."""


@dataclass(frozen=True)
class FixStatus:
    """The ``status`` of one fix with the ``reason``, the upstream links, and the changed or added modules.

    ``status`` is a `te_graph_fixes.status.Status`, a string, and never ``applicable``. ``earlier_graphs`` is the
    number of graphs captured before the fix was applied. These graphs still have the bug.
    """

    status: Status
    reason: str
    upstream: tuple[str, ...]
    targets: tuple[str, ...]
    earlier_graphs: int = 0

    @property
    def is_baked(self) -> bool:
        return self.status == Status.NOT_NEEDED and self.reason.startswith(BAKED)


@dataclass(frozen=True)
class Report:
    """The `FixStatus` of every fix, by its id. ``str(report)`` is a table.

    ``te_version`` is None if TransformerEngine is not found or has no metadata. ``version`` is the version of
    te-graph-fixes. ``copies`` names modules that are copies of TransformerEngine's graph.py, which are not fixed.

    ``mode`` is ``memory`` or ``baked`` by the place of the active fixes, ``failed`` if no fix is active although one is
    missing, ``off``, or ``pending`` before the import of TransformerEngine. ``digest`` has eight hexadecimal digits. It
    is equal in two processes if both versions, the active fixes and the text of the edited modules are equal. Fixes in
    memory and baked fixes have the same digest.
    """

    te_version: str | None
    fixes: dict[str, FixStatus]
    version: str = __version__
    copies: tuple[str, ...] = ()
    mode: str = "pending"
    digest: str = "00000000"

    @property
    def active(self) -> list[str]:
        """The fixes whose code runs in this process, from memory or from TransformerEngine's files."""
        return [fix_id for fix_id, fix in self.fixes.items() if fix.status == Status.APPLIED or fix.is_baked]

    @property
    def missing(self) -> dict[str, str]:
        """The reasons of the fixes that TransformerEngine needs, or may need, but that cannot be applied."""
        return self.having(*CANNOT_APPLY)

    def __str__(self) -> str:
        width = max(map(len, self.fixes), default=0)
        lines = [f"te-graph-fixes {self.version}, {te_name(self.te_version)}"]
        for fix_id, fix in self.fixes.items():
            earlier = f" (not in {count(fix.earlier_graphs, 'graph')} captured before)" if fix.earlier_graphs else ""
            lines.append(f"  {fix_id:{width}}  {fix.status:14}  {fix.reason}{earlier}")
        return "\n".join([*lines, *(f"  {text}" for text in self.copy_warnings())])

    def copy_warnings(self) -> list[str]:
        return [
            f"{name} is a copy of TransformerEngine's graph.py. The fixes do not apply to graphs that it captures."
            for name in self.copies
        ]

    def having(self, *statuses: str) -> dict[str, str]:
        """Return the reason of each fix that has one of these statuses, by id; {} if none has."""
        return {fix_id: fix.reason for fix_id, fix in self.fixes.items() if fix.status in statuses}

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain dicts and lists, ready for JSON."""
        import json  # slow to import

        plain = json.loads(json.dumps(asdict(self)))
        return {"te_graph_fixes_version": plain.pop("version"), **plain}


def problem_summary(report: Report) -> str:
    """Describe the missing fixes and the graphs captured too early, with reasons and remedies; "" if there are none."""
    missing, te = report.missing, te_name(report.te_version)
    lines = []
    if missing:
        number = count(len(missing), "fix")
        lines += [
            f"{number} that {te} needs cannot be applied: its graphs may give wrong gradients.",
            f"Stop the job, or turn graphs off. To run without a fix, add it to {DISABLE}; without all of them, "
            f"set {STRICT}=0.",
            "For a report of the problem, run:",
            "  te-graph-fixes issue",
            "Reasons:",
        ]
        lines += [f"  {named(ids)}: {reason}" for reason, ids in by_reason(missing).items()]
    if early := max((fix.earlier_graphs for fix in report.fixes.values()), default=0):
        were = "graph was" if early == 1 else "graphs were"
        lines += [
            f"{early} {were} captured before the fixes were applied and may give wrong gradients.",
            "Import te_graph_fixes before capturing graphs.",
        ]
    return "\n".join(lines)


def warn_once(text: str) -> None:
    """Warn once in a process for each text, and attribute the warning to the line in the user's program."""
    if not text or text in _printed:
        return
    _printed.add(text)
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _BELOW:
        level += "importlib._bootstrap" not in frame.f_code.co_filename  # `warnings` does not count these frames
        frame = frame.f_back
    warnings.warn(text, TEGraphFixesWarning, stacklevel=level)


def print_stderr(text: str) -> None:
    """Print a line on standard error. Ignore errors: a full disk must not end a job."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
        print(text, file=sys.stderr, flush=True)


def te_name(version: str | None) -> str:
    return f"TransformerEngine {version or '(version unknown)'}"


def by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """Return, for each reason, the ids of the fixes that have it."""
    fixes: dict[str, list[str]] = {}
    for fix_id, reason in reasons.items():
        fixes.setdefault(reason, []).append(fix_id)
    return fixes


def named(fixes: Sequence[str]) -> str:
    """Return the names of the fixes in one string if they are few, else their number, such as ``12 fixes``."""
    return ", ".join(fixes) if len(fixes) <= _MOST_NAMED else count(len(fixes), "fix")


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun == 'fix' else 's'}"
