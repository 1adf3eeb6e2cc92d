"""``te-graph-fixes run --required``: the job ends where a process of it has TransformerEngine (TE) without the fixes.

Every Python that the hook reaches maps a page of memory that has our name, before it can import TE, and is strict then.
Linux shows what a process has mapped to who started it. So a process below this one that has loaded TE's library for
PyTorch and not that page has got round the hook (``python -I``, ``env -i``), and nothing is asked of it to find that
out. Linux also says when the library of the installed TE is opened, so that short processes are seen as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
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
_LIBRARY = "transformer_engine_torch*.so"
_LOADED = re.compile(r"^\S+ ..x\S .*?(/.*transformer_engine_torch[^/\n]*\.so)", re.MULTILINE)
_SECONDS = 2.0
"""Between two looks, and what a process has to `import te_graph_fixes` after TE."""
_OFTEN = 0.1
"""Between two looks where there is something to see: to import TE takes longer."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _IN_OPEN = 1, 36, 0x20
_libc = ctypes.CDLL(None)


def run(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a program and return its exit status, or `MISSING`; OSError where it cannot be started."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    opened = _watch_library()

    def start() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    job = subprocess.Popen(command, env={**environ, REQUIRED: "1"}, preexec_fn=start)

    def pass_on(number: int, _: FrameType | None) -> None:
        job.send_signal(number)

    for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), pass_on)
    for name in ("SIGINT", "SIGQUIT"):  # a terminal sends them to the program as well
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    suspects: dict[str, tuple[float, str]] = {}
    status, often_until, next_look = None, 0.0, 0.0
    while status is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = job.wait(_OFTEN)
        now = time.monotonic()
        with contextlib.suppress(OSError):  # nobody has opened it
            os.read(opened, 4096)
            often_until = now + _SECONDS
        if not suspects and status is None and now > often_until and now < next_look:
            continue
        next_look = now + _SECONDS
        found = {process: (right, about) for process, right, about in _with_te(os.getpid())}
        guilty = [
            about
            for process, (since, about) in suspects.items()
            if process not in found or not (found[process][0] or (status is None and now - since < _SECONDS))
        ]
        if guilty:
            for about in guilty:
                print(f"te-graph-fixes run --required: {about}", file=sys.stderr)
            _end(job)
            return MISSING
        suspects = {
            process: suspects.get(process, (now, about)) for process, (right, about) in found.items() if not right
        }
        _reap(job)
    return status if status >= 0 else 128 - status


def _watch_library() -> int:
    """A file that can be read once somebody has opened the library of the installed TE."""
    watch: int = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    te = importlib.util.find_spec("transformer_engine")
    for folder in map(Path, te.submodule_search_locations or () if te else ()):
        for place in (folder.parent, folder, folder / "wheel_lib"):
            for library in place.glob(_LIBRARY):
                _libc.inotify_add_watch(watch, os.fsencode(library), _IN_OPEN)
    return watch


def _with_te(parent: int) -> Iterator[tuple[str, bool, str]]:
    """The processes below ``parent`` that have loaded TE: number and start, whether it is right, and a sentence."""
    for number in _below(parent):
        with contextlib.suppress(OSError):  # it has ended
            maps = Path("/proc", number, "maps").read_text(errors="replace")
            if library := _LOADED.search(maps):
                words = Path("/proc", number, "cmdline").read_bytes().decode(errors="replace").split("\0")
                started = Path("/proc", number, "stat").read_text().rpartition(")")[2].split()[19]
                yield (
                    f"{number} {started}",
                    MARK in maps or _on_disk(number, started, library[1]),
                    f"process {number} ({' '.join(words).strip()[:200]}) has imported TransformerEngine without the "
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
    with contextlib.suppress(ChildProcessError):
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


@functools.cache
def _on_disk(process: str, _started: str, library: str) -> bool:
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
