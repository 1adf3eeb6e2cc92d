"""``te-graph-fixes run --required``: the job ends where a process of it has TransformerEngine (TE) without the fixes.

Every Python that the hook reaches maps a page of memory that has our name, before it can import TE, and is strict then.
Linux shows what a process has mapped to who started it. So a process below this one that has mapped TE's library and
not that page has got round the hook (``python -I``, ``env -i``), and nothing is asked of it to find that out.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from .settings import REQUIRED
from .stamp import ChangedStampError, of_tree

MISSING = 87
"""The exit status of a job in which a process was without the fixes."""
MARK = "te_graph_fixes_active"
_LIBRARY = re.compile(r"(/\S*transformer_engine\S*\.so\S*)$", re.MULTILINE)
_SECONDS = 2.0
"""Between two looks. A process has to be found by both, since it may be about to `import te_graph_fixes`."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def run(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a program and return its exit status, or `MISSING`; OSError where it cannot be started."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def start() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    job = subprocess.Popen(command, env={**environ, REQUIRED: "1"}, preexec_fn=start)

    def pass_on(number: int, _: FrameType | None) -> None:
        job.send_signal(number)

    for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), pass_on)
    for name in ("SIGINT", "SIGQUIT"):  # a terminal sends them to the program as well
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    suspects: set[str] = set()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = job.wait(_SECONDS)
            return status if status >= 0 else 128 - status
        found = dict(without(os.getpid()))
        _reap(job)
        if missing := suspects & found.keys():
            for each in sorted(missing):
                print(f"te-graph-fixes run --required: {found[each]}", file=sys.stderr)
            _end(job)
            return MISSING
        suspects = set(found)


def without(parent: int) -> Iterator[tuple[str, str]]:
    """The processes below ``parent`` that have TE's library without the fixes: number and start, and a sentence."""
    for process in _below(parent):
        with contextlib.suppress(OSError):  # it has ended
            maps = Path("/proc", process, "maps").read_text(errors="replace")
            library = _LIBRARY.search(maps)
            if library and MARK not in maps and not _on_disk(process, library[1]):
                words = Path("/proc", process, "cmdline").read_bytes().decode(errors="replace").split("\0")
                started = Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[19]
                yield (
                    f"{process} {started}",
                    f"process {process} ({' '.join(words).strip()[:200]}) has imported TransformerEngine without the "
                    "fixes, so the job was ended. Start that Python without -I, -E and -S and with the environment of "
                    "this one, or `import te_graph_fixes` in it first",
                )


def mark() -> None:
    """Show who looks that this process has the fixes, in a page that lives as long as it, and in its forks."""
    import mmap

    file = os.memfd_create(MARK)
    os.ftruncate(file, mmap.PAGESIZE)
    _marks.append(mmap.mmap(file, mmap.PAGESIZE))
    os.close(file)


_marks: list[object] = []


def _reap(job: subprocess.Popen[bytes]) -> None:
    """Let the processes go that have lost their parents to this one and have ended."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != job.pid:
        os.waitpid(ended.si_pid, 0)


def _below(parent: int) -> list[str]:
    """The numbers of all processes that a process has started, and those that these have."""
    children: dict[str, list[str]] = {}
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            above = Path("/proc", process, "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(above, []).append(process)
    found = children.get(str(parent), [])
    for process in found:
        found += children.get(process, [])
    return found


def _on_disk(process: str, library: str) -> bool:
    """Whether the TE that a process has loaded is corrected on disk."""
    folders = [folder for folder in Path(library).parents if (folder / "transformer_engine" / "pytorch").is_dir()]
    location = f"/proc/{process}/root{folders[0]}/transformer_engine" if folders else ""
    try:
        return bool(location) and of_tree(location) is not None
    except ChangedStampError:
        return False


def _end(job: subprocess.Popen[bytes]) -> None:
    """Ask the program and all that it has started to end, then make them."""
    for number, seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 1.0)):
        for process in _below(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(seconds)
        time.sleep(0.1)
