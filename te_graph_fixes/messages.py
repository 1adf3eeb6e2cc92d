"""The messages of a process about its fixes: the status line, warnings and errors."""

import os
import sys

from .ranks import is_first_on_host, rank
from .settings import DISABLE, STRICT
from .status import Report
from .text import by_value, count, named, print_stderr, te_name

_printed: set[str] = set()


class FixNotAppliedError(RuntimeError):
    """The error of `require_same_on_all_ranks`, and of strict mode, for example if a needed fix cannot be applied."""


class TEGraphFixesWarning(UserWarning):
    """A warning that graphs may be wrong, or that a setting has no effect."""


def problem_summary(report: Report) -> str:
    """Return a message about missing fixes and graphs captured too early, with reasons and remedies, or ""."""
    missing, te = report.missing, te_name(report.te_version)
    lines = []
    if missing:
        number = count(len(missing), "fix")
        lines += [
            f"{number} that {te} needs cannot be applied: its graphs may give wrong gradients.",
            f"Stop the job, or turn graphs off. To run without a fix, add it to {DISABLE}; without all of them, "
            f"set {STRICT}=0.",
            "To report the problem, run:",
            "  te-graph-fixes issue",
            "Reasons:",
        ]
        lines += [f"  {named(ids)}: {reason}" for reason, ids in by_value(missing).items()]
    if early := max((fix.earlier_graphs for fix in report.fixes.values()), default=0):
        were = "graph was" if early == 1 else "graphs were"
        lines += [
            f"{early} {were} captured before the fixes were applied and may give wrong gradients.",
            "Import te_graph_fixes before capturing graphs.",
        ]
    return "\n".join(lines)


def status_line(report: Report) -> str:
    """Return the line about the fixes of this process. Its form is always the same, so that scripts can read it."""
    values = {
        "host": os.uname().nodename,
        "rank": rank() or "-",
        "te": report.te_version or "unknown",
        "package": report.version,
        "mode": report.mode,
        "applied": len(report.active),
        "missing": len(report.missing),
        "digest": report.digest,
    }
    return "te-graph-fixes: " + " ".join(f"{name}={''.join(str(value).split())}" for name, value in values.items())


def print_status_line(report: Report, verbose: bool | None, remark: str = "") -> None:
    """Print the status line and a remark once, if ``verbose`` selects this process or a fix is missing.

    If ``verbose`` is None, the first rank of each host prints it. A daemon process, such as a worker of a DataLoader,
    would repeat the line of its parent, so it prints the line only if a fix is missing.
    """
    multiprocessing = sys.modules.get("multiprocessing.process")  # each daemon process has imported this module
    is_daemon = multiprocessing is not None and multiprocessing.current_process().daemon
    is_wanted = is_first_on_host() if verbose is None else verbose
    line = status_line(report) + remark
    if line not in _printed and (report.missing or (is_wanted and not is_daemon)):
        _printed.add(line)
        print_stderr(line)
