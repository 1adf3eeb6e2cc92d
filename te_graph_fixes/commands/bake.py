"""Corrections in the files of TransformerEngine (TE): ``bake`` puts them in place, ``bake --overlay`` beside it.

A bake gathers a copy of each module that it changes, and its new text, in the folder `KEPT` inside TE's. Then it
exchanges them, and keeps the copies for ``bake --undo``, which exchanges them back. The stamp says how far that is:

    there is none           no module of TE has changed
    .te-graph-fixes/open    modules are being exchanged, one way or the other. Importing TE is an error that says so
    te-graph-fixes.json     the bake is done

The command that follows one that was killed takes back what is not done. An exchange renames and deletes files, and
writes none, so it needs no space on the disk. Folders are not renamed: those of a container's lower layers cannot be.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..patching import TE
from ..patching.source import Source
from ..stamp import KEPT, NAME, OPEN, ReplacedError, Stamp, of_source

BEFORE, AFTER, GUARD = "before", "after", "guard"
_GUARD_TEXT = 'raise RuntimeError("wait for `te-graph-fixes bake`, or start it again: it runs, or was interrupted")\n'


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


def in_place(location: Path, files: Mapping[str, tuple[str, str]]) -> None:
    """Write corrected modules and their stamp into the TE in a folder, or change nothing."""
    root, kept = location.parent, location / KEPT
    guard = {GUARD: ("", _GUARD_TEXT)}  # one for the way there, one for the way back
    try:
        write(kept / BEFORE, root, guard)
        write(kept / AFTER, root, {**files, **guard})
        for path in (path for path, (before, _) in files.items() if before):
            (kept / BEFORE / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / path, kept / BEFORE / path, follow_symlinks=False)
        os.rename(kept / AFTER / TE / NAME, location / OPEN)
        _exchange(location, AFTER)
        os.rename(location / OPEN, location / NAME)
    finally:
        roll_back(location)


def written(location: Path, stamp: Stamp) -> dict[str, tuple[str, str]]:
    """The files of a bake as `in_place` takes them, to put it in place again; digests stand for the texts before."""
    befores = {path: before or "" for path, (before, _) in stamp.files.items()} | {f"{TE}/{NAME}": ""}
    return {path: (before, (location.parent / path).read_bytes().decode()) for path, before in befores.items()}


def undo(source: Source) -> str:
    """Give each changed module its very bytes back, unless TE was installed anew, and delete the added ones.

    Returns a sentence about that. Raises `BakeError` where there is no bake, `ChangedStampError` after a later edit.
    """
    location = Path(source.location)
    try:
        stamp = of_source(source)
        if stamp is None or not (location / KEPT).exists():
            raise BakeError(f"there is no bake in {location}. A patch is taken back with `patch -p1 -R`")
        done = f"{len(stamp.files)} modules of {location} are as they were before the bake of {stamp.by}"
    except ReplacedError:
        shutil.rmtree(location / KEPT, ignore_errors=True)  # the modules of another TE
        (location / KEPT).mkdir()
        done = f"what a bake had left in {location} is deleted"
    os.rename(location / NAME, location / OPEN)
    roll_back(location)  # an undo is a bake that is taken back
    return done


def roll_back(location: Path) -> bool:
    """Take back a bake or an undo that is not done; whether there was one."""
    if not (location / KEPT).exists() or (location / NAME).exists():
        return False
    if (location / OPEN).exists():
        _exchange(location, BEFORE)
    shutil.rmtree(location / KEPT)
    return True


def write(folder: Path, root: Path, files: Mapping[str, tuple[str, str]]) -> None:
    """Write the texts after into a folder, with the permissions of those before, or of TE's first module."""
    for path, (before, after) in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(after.encode())
        shutil.copymode(root / (path if before else f"{TE}/__init__.py"), folder / path)


def _exchange(location: Path, side: str) -> None:
    """Put the files of one side in place, as far as they are not there yet.

    Importing TE imports every module that is edited, so a guard in the place of the first one closes it meanwhile.
    """
    root, new = location.parent, location / KEPT / side
    files = Stamp.read(location / OPEN).files
    gate = next(path for path, (before, _) in files.items() if before)
    others = [path for path in files if path != gate]
    for name, path in [(GUARD, gate), *((path, path) for path in others), (gate, gate)]:
        if os.path.lexists(new / name):
            for compiled in (root / path).parent.glob(f"__pycache__/{Path(path).stem}.*.pyc"):
                compiled.unlink()  # Python may take it without a look at the text
            os.replace(new / name, root / path)
        elif side == BEFORE and files[path][0] is None:
            (root / path).unlink(missing_ok=True)
