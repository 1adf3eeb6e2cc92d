"""Corrections in the files of TransformerEngine (TE): ``bake`` puts them in place, ``bake --overlay`` beside it.

A bake gathers, in a folder inside TE's, a copy of each module that it changes and its new text. Then it exchanges them,
and keeps the copies for ``bake --undo``, which exchanges them back:

    .te-graph-fixes.part    is being gathered: no module of TE has changed
    .te-graph-fixes.open    modules are being exchanged, one way or the other. Importing TE is an error that says so
    .te-graph-fixes         the bake is done; the copies are here

The next command after one that was killed deletes the first, and takes back what is in the second. During an exchange
files are renamed and deleted and none is written, so it needs no space on the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..patching.source import TE, Source
from ..stamp import NAME, OPEN, ChangedStampError, Stamp, of_source

Files = Mapping[str, tuple[str, str]]
"""Texts before ("": there is no such file) and after, by their paths from the folder that holds TE."""

PART, KEPT = ".te-graph-fixes.part", ".te-graph-fixes"
BEFORE, AFTER, GUARD = "before", "after", "guard"
_GUARD_TEXT = """\
raise RuntimeError(
    "`te-graph-fixes bake` is changing this TransformerEngine, or was interrupted: if it does not run, start it again"
)
"""


class BakeError(Exception):
    """TE on disk cannot be changed, or not be changed back; it is as it was, unless the message says otherwise."""


@contextlib.contextmanager
def changing(location: Path) -> Iterator[bool]:
    """Let one process at a time change the TE in a folder. Yields whether it took back what another had left."""
    folder = os.open(location, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield roll_back(location)
    finally:
        os.close(folder)


def in_place(location: Path, files: Files) -> None:
    """Write corrected modules and their stamp into the TE in a folder, or change nothing."""
    root, part = location.parent, location / PART
    guard = {GUARD: ("", _GUARD_TEXT)}  # one for the way there, one for the way back
    try:
        write(part / BEFORE, root, guard)
        write(part / AFTER, root, {**files, **guard})
        for path in (path for path, (before, _) in files.items() if before):
            (part / BEFORE / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / path, part / BEFORE / path, follow_symlinks=False)
        shutil.copy(part / AFTER / TE / NAME, part / NAME)
        os.rename(part, location / OPEN)
        _exchange(location, AFTER)
        os.rename(location / OPEN, location / KEPT)
    finally:
        roll_back(location)


def undo(source: Source) -> str:
    """Give every module that was changed its very bytes back, and delete those that were added; returns what to say.

    Of a TE that was replaced since, only what is left of the bake is deleted. Raises `BakeError` where there is no
    bake, and `ChangedStampError` where a module was edited after it.
    """
    location = Path(source.location)
    try:
        stamp = of_source(source)
    except ChangedStampError as error:
        if error.leftover is None:
            raise
        shutil.rmtree(location / KEPT, ignore_errors=True)
        for path in error.leftover.added:
            (location.parent / path).unlink(missing_ok=True)
        return f"what a bake had left in {location} is deleted"
    if stamp is None or not (location / KEPT).exists():
        raise BakeError(f"there is no bake in {location}. A patch is taken back with `patch -p1 -R`")
    os.rename(location / KEPT, location / OPEN)
    roll_back(location)  # an undo is a bake that is taken back
    return f"{len(stamp.files)} modules of {location} are as they were before the bake"


def roll_back(location: Path) -> bool:
    """Take back what an interrupted bake, or an interrupted undo, has left; whether there was any."""
    part, opened = location / PART, location / OPEN
    is_interrupted = part.exists() or opened.exists()
    if opened.exists():
        _exchange(location, BEFORE)
        os.rename(opened, part)
    if part.exists():
        shutil.rmtree(part)
    return is_interrupted


def write(folder: Path, root: Path, files: Files) -> None:
    """Write the new texts into a folder, with the permissions of the old ones, or of TE's first module."""
    for path, (before, after) in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(after.encode())
        shutil.copymode(root / (path if before else f"{TE}/__init__.py"), folder / path)


def _exchange(location: Path, side: str) -> None:
    """Put the files of one side in place, as far as they are not there yet.

    Importing TE imports every module that is edited, so a guard in the place of the first one closes it meanwhile.
    """
    root, new = location.parent, location / OPEN / side
    stamp = Stamp.read(location / OPEN)
    gate, *others = stamp.edited
    _move(new / GUARD, root / gate)
    for path in (*others, *stamp.added):
        _move(new / path, root / path)
    for path in stamp.added if side == BEFORE else ():
        (root / path).unlink(missing_ok=True)
    _move(new / gate, root / gate)


def _move(new: Path, path: Path) -> None:
    """Put a new file in the place of another, whose bytecode Python may take without a look at the text."""
    if os.path.lexists(new):
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()
        os.replace(new, path)


def import_problem() -> str:
    """Why a new process cannot import the installed TE, which imports every module that is edited; "" where it can."""
    command = [sys.executable, "-c", f"import {TE}.pytorch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stderr.strip().rpartition("\n")[2]
    return said or f"it ended with status {done.returncode}" if done.returncode else ""
