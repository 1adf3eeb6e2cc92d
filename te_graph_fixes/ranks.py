"""The rank of this process in its job, and the line that it prints about its fixes."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .report import Report

_RANKS = (
    "RANK",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PMIX_RANK",
    "MV2_COMM_WORLD_RANK",
    "PALS_RANKID",
    "FLUX_TASK_RANK",
)
_LOCAL_RANKS = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "FLUX_TASK_LOCAL_ID",
)
"""The environment variables of launchers. torchrun's come first: it may run inside a task of Slurm or MPI."""
_printed: set[str] = set()


def rank() -> str | None:
    """Return the rank of this process, as set by its launcher; None without a launcher."""
    return _first_set(_RANKS)


def is_first_on_host() -> bool:
    """Return whether this process is the first rank of its host, or is started without a launcher."""
    return (_first_set(_LOCAL_RANKS) or rank()) in (None, "0")


def _first_set(names: tuple[str, ...]) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


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
    """Print the status line and a remark once, in the processes that the setting selects, and if a fix is missing.

    If ``verbose`` is None, the first rank of each host prints it. A daemon process, such as a worker of a DataLoader,
    would repeat the line of its parent, so it prints only missing fixes.
    """
    multiprocessing = sys.modules.get("multiprocessing.process")  # each daemon process has imported it
    is_daemon = multiprocessing is not None and multiprocessing.current_process().daemon
    is_wanted = is_first_on_host() if verbose is None else verbose
    line = status_line(report) + remark
    if line not in _printed and (report.missing or (is_wanted and not is_daemon)):
        _printed.add(line)
        write_stderr(line)


def write_stderr(text: str) -> None:
    """Write a line to file descriptor 2. Ignore errors: a full disk must not end a job."""
    if sys.__stderr__ is not None:  # else the descriptor may be another file
        with contextlib.suppress(OSError):
            os.write(2, f"{text}\n".encode(errors="backslashreplace"))
