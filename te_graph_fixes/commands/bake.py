"""Corrections on disk: what ``te-graph-fixes diff`` prints, ``bake`` puts in place, and ``bake --overlay`` lays beside.

A bake gathers, in a folder inside TransformerEngine's (TE's), a copy of each module that it changes and its new text.
Then it exchanges them, and keeps the copies for ``bake --undo``, which exchanges them back:

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

from ..decision import Decision
from ..patching.installation import patched
from ..patching.source import TE, Source
from ..stamp import LEFT_OUT, MADE, NAME, OPEN, ChangedStampError, Stamp, digest, digest_of, of_source, own_text
from ..version import __version__

PART, KEPT = ".te-graph-fixes.part", ".te-graph-fixes"
BEFORE, AFTER, GUARD = "before", "after", "guard"
_GUARD_TEXT = """\
raise RuntimeError(
    "`te-graph-fixes bake` is changing this TransformerEngine, or was interrupted: if it does not run, start it again"
)
"""


class BakeError(Exception):
    """TE on disk cannot be changed, or not be changed back; it is as it was, unless the message says otherwise."""


def corrected(decision: Decision) -> dict[str, tuple[str, str]]:
    """The text, before ("": there is none) and after, of every module that the fixes to be applied change or add.

    The keys are the paths from the folder that holds TE, in their order, and last that of the stamp; the line breaks
    are those of each file.
    """
    source, files = decision.source, {}
    for name, texts in patched(source, decision.to_apply).items():
        module = source.find(name)
        before, after = (text.replace("\n", module.newline if module else "\n") for text in texts)
        files[module_path(source, name)] = before, after
    if not files:
        return {}
    files = dict(sorted(files.items()))
    fixes = {fix_id: str(verdict.state) for fix_id, verdict in decision.verdicts.items()}
    fixes |= dict.fromkeys(decision.to_apply, MADE) | dict.fromkeys(decision.left_out, LEFT_OUT)
    root = Path(source.location).parent
    digests = {path: (digest_of(root / path), digest(after.encode())) for path, (_, after) in files.items()}
    return {**files, f"{TE}/{NAME}": ("", Stamp(__version__, own_text(), decision.version, fixes, digests).as_json)}


def module_path(source: Source, module: str) -> str:
    """The path of a module's file, from the folder that holds TE."""
    file = source.find(module)
    return os.path.relpath(file.path, os.path.dirname(source.location)) if file else f"{module.replace('.', '/')}.py"


def require_complete(decision: Decision) -> None:
    """Raise `BakeError` where a fix that TE needs cannot be applied."""
    if decision.refused:
        reasons = "; ".join(f"{', '.join(ids)}: {reason}" for reason, ids in decision.refused.items())
        why = decision.refusal or f"not every fix that is needed can be applied. {reasons}"
        raise BakeError(f"nothing was written, because {why}")


@contextlib.contextmanager
def changing(location: Path) -> Iterator[bool]:
    """Let one process at a time change the TE in a folder. Yields whether it took back what another had left."""
    folder = os.open(location, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield roll_back(location)
    finally:
        os.close(folder)


def in_place(decision: Decision) -> dict[str, tuple[str, str]]:
    """Write every corrected module, and the stamp, into TE, or change nothing; returns them."""
    location, files = Path(decision.source.location), corrected(decision)
    try:
        _gather(location, files)
        os.rename(location / PART, location / OPEN)
        _exchange(location, AFTER)
        os.rename(location / OPEN, location / KEPT)
    finally:
        roll_back(location)
    return files


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
        return f"{len(error.leftover.added)} files that a bake had left in {location} are deleted"
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


def _gather(location: Path, files: Mapping[str, tuple[str, str]]) -> None:
    """Fill the folder `PART`: of each module a copy and its new text, and two guards, for the way there and back."""
    root, part, guard = location.parent, location / PART, {GUARD: ("", _GUARD_TEXT)}
    for path in (path for path, (before, _) in files.items() if before):
        (part / BEFORE / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / path, part / BEFORE / path, follow_symlinks=False)
    _write(part / BEFORE, root, guard)
    _write(part / AFTER, root, {**files, **guard})
    shutil.copy(part / AFTER / TE / NAME, part / NAME)


def _write(folder: Path, root: Path, files: Mapping[str, tuple[str, str]]) -> None:
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


def left_over(folder: str | None) -> str:
    """What to say of a TE that was uninstalled, in a folder or one of this interpreter, where a bake is left of it."""
    for location in (Path(parent, TE) for parent in (sys.path if folder is None else [folder])):
        if (location / NAME).exists():
            return f"; delete {location}: it holds what is left of a bake"
    return ""


def import_problem() -> str:
    """Why a new process cannot import the installed TE, which imports every module that is edited; "" where it can."""
    command = [sys.executable, "-c", f"import {TE}.pytorch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


def overlay(decision: Decision, folder: Path) -> list[str]:
    """Write the corrected modules, and the stamp, into a folder that is new or empty; returns their paths there."""
    if folder.exists() and any(folder.iterdir()):
        raise BakeError(f"{folder} is not empty: name another folder")
    files = corrected(decision)
    _write(folder, Path(decision.source.location).parent, files)
    return list(files)
