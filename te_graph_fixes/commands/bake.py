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
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..decision import Decision
from ..patching.installation import patched
from ..patching.source import TE, Source
from ..stamp import LEFT_OUT, MADE, NAME, OPEN, LeftoverError, Stamp, digest, digest_of, of_source, own_text
from ..version import __version__

PART, KEPT = ".te-graph-fixes.part", ".te-graph-fixes"
BEFORE, AFTER, GUARD = "before", "after", "guard"
_GUARD_TEXT = b"""\
raise RuntimeError(
    "`te-graph-fixes bake` is changing this TransformerEngine, or was interrupted: if it does not run, start it again"
)
"""


class BakeError(Exception):
    """TE on disk cannot be changed, or not be changed back; it is as it was, unless the message says otherwise."""


@dataclass(frozen=True)
class Corrected:
    """A file of TE as text, ``before`` ("": there is none) and ``after``, with the line breaks of the file.

    ``path`` is from the folder that holds TE.
    """

    path: str
    before: str
    after: str


def corrected(decision: Decision) -> list[Corrected]:
    """Every module that the fixes to be applied change or add, in the order of the paths, and then the stamp."""
    source, files = decision.source, []
    for name, texts in patched(source, decision.to_apply).items():
        module = source.find(name)
        before, after = (text.replace("\n", module.newline if module else "\n") for text in texts)
        files.append(Corrected(module_path(source, name), before, after))
    if not files:
        return []
    files.sort(key=lambda file: file.path)
    fixes = {fix_id: str(verdict.state) for fix_id, verdict in decision.verdicts.items()}
    fixes |= dict.fromkeys(decision.to_apply, MADE) | dict.fromkeys(decision.left_out, LEFT_OUT)
    root = Path(source.location).parent
    digests = {file.path: (digest_of(root / file.path), digest(file.after.encode())) for file in files}
    stamp = Stamp(__version__, own_text(), decision.version, fixes, digests)
    return [*files, Corrected(f"{TE}/{NAME}", "", stamp.as_json)]


def module_path(source: Source, module: str) -> str:
    """The path of a module's file, from the folder that holds TE."""
    file = source.find(module)
    return os.path.relpath(file.path, os.path.dirname(source.location)) if file else f"{module.replace('.', '/')}.py"


def require_complete(decision: Decision) -> None:
    """Raise `BakeError` where a fix that TE needs cannot be applied, or the settings leave out all that it needs."""
    if decision.refused:
        reasons = "; ".join(f"{', '.join(ids)}: {reason}" for reason, ids in decision.refused.items())
        why = decision.refusal or f"not every fix that is needed can be applied. {reasons}"
        raise BakeError(f"nothing was written, because {why}")
    if decision.left_out and not decision.to_apply:
        by = decision.settings.chosen_by
        raise BakeError(f"nothing was written: {len(decision.left_out)} fixes are left out by {by}")


@contextlib.contextmanager
def changing(location: Path) -> Iterator[bool]:
    """Let one process at a time change the TE in a folder. Yields whether it took back what another had left."""
    folder = os.open(location, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield roll_back(location)
    finally:
        os.close(folder)


def in_place(decision: Decision) -> list[Corrected]:
    """Write every corrected module, and the stamp, into TE, or change nothing and raise `BakeError`; returns them."""
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
    except LeftoverError as error:
        left = [path for path, (before, _) in error.stamp.files.items() if before is None]
        shutil.rmtree(location / KEPT, ignore_errors=True)
        for path in (*left, f"{TE}/{NAME}"):
            (location.parent / path).unlink(missing_ok=True)
        return f"{len(left)} modules that a bake had left in {location} are deleted"
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


def _gather(location: Path, files: Sequence[Corrected]) -> None:
    """Fill the folder `PART`: of each module a copy and its new text, and two guards, for the way there and back."""
    root, part = location.parent, location / PART
    first = next(file.path for file in files if file.before)
    for file in files:
        if file.before:
            copy = part / BEFORE / file.path
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / file.path, copy, follow_symlinks=False)
        _write(part / AFTER / file.path, file.after.encode(), root / (file.path if file.before else first))
    for side in (BEFORE, AFTER):
        _write(part / side / GUARD, _GUARD_TEXT, root / first)
    shutil.copy(part / AFTER / TE / NAME, part / NAME)


def _exchange(location: Path, side: str) -> None:
    """Put the files of one side in place, as far as they are not there yet.

    Importing TE imports every module that is edited, so a guard in the place of the first one closes it meanwhile.
    """
    root, opened = location.parent, location / OPEN
    digests = json.loads((opened / NAME).read_bytes())["files"]
    first, *edited = [path for path, (before, _) in digests.items() if before]
    added = [*(path for path, (before, _) in digests.items() if not before), f"{TE}/{NAME}"]
    _move(opened / side / GUARD, root / first)
    for path in (*edited, *added):
        _move(opened / side / path, root / path)
    for path in added if side == BEFORE else ():
        (root / path).unlink(missing_ok=True)
    _move(opened / side / first, root / first)


def _move(new: Path, path: Path) -> None:
    """Put a new file in the place of another, whose bytecode Python may take without a look at the text."""
    if os.path.lexists(new):
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()
        os.replace(new, path)


def _write(path: Path, data: bytes, like: Path) -> None:
    """A new file with the permissions of another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    shutil.copymode(like, path)


def left_over(folder: str | None) -> Source | None:
    """What is left of a bake in a TE that was uninstalled, in a folder or one of this interpreter; None for nothing."""
    for parent in sys.path if folder is None else [folder]:
        location = Path(parent, TE)
        if (location / NAME).exists() and not (location / "__init__.py").exists():
            return Source(str(location), None)
    return None


def import_problem(paths: Iterable[str]) -> str:
    """Why a new process cannot import the installed TE, and the modules with these paths in it; "" where it can."""
    modules = [path[:-3].removesuffix("/__init__").replace("/", ".") for path in paths if path.endswith(".py")]
    program = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)"
    command = [sys.executable, "-c", program, f"{TE}.pytorch", *modules]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


def overlay(decision: Decision, folder: Path) -> list[Corrected]:
    """Write the corrected modules, and the stamp, into a folder that is new or empty; returns them."""
    if folder.exists() and any(folder.iterdir()):
        raise BakeError(f"{folder} is not empty: name another folder")
    root, files = Path(decision.source.location).parent, corrected(decision)
    for file in files:
        like = root / file.path if file.before else Path(decision.source.location, "__init__.py")
        _write(folder / file.path, file.after.encode(), like)
    return files
