"""``te-graph-fixes run --required``: the job ends where a process of it has TransformerEngine (TE) without the fixes.

Every Python that the hook reaches maps a page of memory that has our name, before it can import TE, and is strict then.
Linux lets one read the memory map of a process that one has started. So a process below this one that has loaded TE's
library for PyTorch and not that page has got round the hook (``python -I``, ``env -i``); it need not help to find that
out. To import TE takes longer than it takes until the next look.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..launcher.te_graph_fixes_run import NAME
from ..settings import REQUIRED
from ..stamp import ChangedStampError, of_tree

MISSING = 87
"""The exit status of a job in which a process was without the fixes."""
_LOADED = re.compile(r"^\S+ ..x\S .*?(/.*transformer_engine_torch[^/\n]*\.so)", re.MULTILINE)
_LOOK = 0.1
"""Seconds between two looks."""
_PARENT, _STARTED, _STACK = 1, 19, 25
"""Places in ``/proc/NUMBER/stat``, from behind the name of the program."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)


def run(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a program and return its exit status, or `MISSING`; OSError where it cannot be started."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    end_with_us = functools.partial(_libc.prctl, _PR_SET_PDEATHSIG, signal.SIGTERM)
    job = subprocess.Popen(command, env={**environ, REQUIRED: "1"}, preexec_fn=end_with_us)
    for name in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, lambda number, _: job.send_signal(number))
    for name in (signal.SIGINT, signal.SIGQUIT):  # a terminal sends them to the program as well
        signal.signal(name, signal.SIG_IGN)
    watch, status = _Watch(), None
    while status is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = job.wait(_LOOK)
        if guilty := watch.guilty():
            for about in guilty:
                print(f"te-graph-fixes run --required: {about}", file=sys.stderr)
            _end(job, watch)
            return MISSING
        _reap(job)
    return status if status >= 0 else 128 - status


class _Watch:
    """The processes below this one: which have the fixes, and which TE without them."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}
        self._right: set[str] = set()

    def below(self) -> list[str]:
        """The numbers of all that this process has started, and that these have; orphans of them are given to it."""
        there = set(filter(str.isdecimal, os.listdir("/proc")))
        self._parents = {number: parent for number, parent in self._parents.items() if {number, parent} <= there}
        for number in there - self._parents.keys():
            with contextlib.suppress(OSError):  # it has ended
                self._parents[number] = _stat(number)[_PARENT]
        children = defaultdict[str, list[str]](list)
        for number, parent in self._parents.items():
            children[parent].append(number)
        found = children[str(os.getpid())]
        for number in found:
            found += children[number]
        return found

    def guilty(self) -> list[str]:
        """A sentence for each process that has TE without the fixes."""
        found = []
        for number in self.below():
            with contextlib.suppress(OSError):  # it has ended
                if not self._is_right(number):
                    words = Path("/proc", number, "cmdline").read_text(errors="replace").replace("\0", " ").split()
                    found.append(
                        f"process {number} ({' '.join(words)[:200]}) has imported TransformerEngine without the fixes, "
                        "so the job was ended. Start that Python without -I, -E and -S and with the environment of "
                        "this one, or `import te_graph_fixes` in it first"
                    )
        return found

    def _is_right(self, number: str) -> bool:
        """Whether a process has the fixes, which it then has for good, or no TE so far."""
        stat = _stat(number)
        process = f"{number} {stat[_STARTED]} {stat[_STACK]}"  # what it executes next has another stack
        if process in self._right:
            return True
        maps = Path("/proc", number, "maps").read_text(errors="replace")
        library = _LOADED.search(maps)
        if NAME in maps or (library and _on_disk(number, library[1])):
            self._right.add(process)
        return process in self._right or not library


def _stat(number: str) -> list[str]:
    return Path("/proc", number, "stat").read_text(errors="replace").rpartition(")")[2].split()


def _on_disk(number: str, library: str) -> bool:
    """Whether the TE that a process has loaded is corrected on disk."""
    for folder in Path(library).parents:
        with contextlib.suppress(ChangedStampError):
            if of_tree(f"/proc/{number}/root{folder}/transformer_engine"):
                return True
    return False


def _reap(job: subprocess.Popen[bytes]) -> None:
    """Let the processes go that have lost their parents to this one and have ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != job.pid:
            os.waitpid(ended.si_pid, 0)


def _end(job: subprocess.Popen[bytes], watch: _Watch) -> None:
    """Ask the program and all that it has started to end, then make them."""
    for number, seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 1.0)):
        for process in watch.below():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(seconds)
        time.sleep(0.1)
