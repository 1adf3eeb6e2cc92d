"""Write the fixes into files of TransformerEngine (TE): in place for ``bake``, in a folder for ``bake --overlay``.

A bake first writes a copy of each changed module and the new text to `BAKE_FOLDER` inside TE's folder. Then it moves
the new files into place. The copies remain for ``bake --undo``, which moves them back. Two files show the progress:

    neither                 no module of TE has changed
    .te-graph-fixes/open    modules are being moved, by a bake or its undo. Importing TE raises an error
    te-graph-fixes.json     the bake is done

If a command was killed, the next command rolls its work back. Moving the files into place needs no disk space, because
files are only renamed and deleted. Folders are not renamed, because this fails for folders in the lower layers of a
container.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..decision import Decision
from ..manifest import BAKE_FOLDER, NAME, OPEN, Manifest, ReinstalledError, digest, read_manifest
from ..patching import TE
from ..patching.installation import patched
from ..patching.source import Source
from ..status import Status
from ..version import __version__

BEFORE, AFTER, GUARD = "before", "after", "guard"
_GUARD_TEXT = """\
raise RuntimeError(
    "TransformerEngine is being baked, or a bake was interrupted. Wait for it, or run `te-graph-fixes bake` again."
)
"""


class BakeError(Exception):
    """An error while changing or restoring TE's files. The files are unchanged unless the message states otherwise."""


def baked_files(decision: Decision) -> dict[str, tuple[str, str]]:
    """Return, for every module that the fixes change or add, its text before and after the bake ("" before: added).

    The keys are paths relative to the folder that contains TE. They are sorted, with the manifest at the end. Each text
    has the line breaks of its file.
    """
    source, files = decision.source, {}
    for name, texts in patched(source, decision.to_apply).items():
        module = source.find(name)
        before, after = (text.replace("\n", module.newline if module else "\n") for text in texts)
        files[module_path(source, name)] = before, after
    if not files:
        return {}
    files = dict(sorted(files.items()))
    digests = {
        path: (digest(before.encode()) if before else None, digest(after.encode()))
        for path, (before, after) in files.items()
    }
    statuses = {fix_id: str(verdict.status) for fix_id, verdict in decision.reading.verdicts.items()}
    statuses |= dict.fromkeys(decision.to_apply, str(Status.APPLIED))
    statuses |= dict.fromkeys(decision.disabled, str(Status.DISABLED))
    manifest = Manifest(__version__, decision.source.version, statuses, digests)
    return {**files, f"{TE}/{NAME}": ("", manifest.to_json())}


def module_path(source: Source, module: str) -> str:
    """Return the path of a module's file, relative to the folder that contains TE."""
    file = source.find(module)
    return os.path.relpath(file.path, os.path.dirname(source.location)) if file else f"{module.replace('.', '/')}.py"


def is_outdated(manifest: Manifest | None) -> bool:
    """Return whether another version of this package baked the fixes."""
    return manifest is not None and manifest.version != __version__


@contextlib.contextmanager
def locked(location: Path) -> Iterator[bool]:
    """Lock the TE in a folder for this process. Yield whether an interrupted bake or undo had to be rolled back."""
    folder = os.open(location, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield roll_back(location)
    finally:
        os.close(folder)


def write_in_place(location: Path, files: Mapping[str, tuple[str, str]]) -> None:
    """Write fixed modules and their manifest into the TE in a folder. After an error, the TE is unchanged."""
    root, kept = location.parent, location / BAKE_FOLDER
    guard = {GUARD: ("", _GUARD_TEXT)}  # one copy for the bake, another for the undo
    try:
        write_files(kept / BEFORE, root, guard)
        write_files(kept / AFTER, root, {**files, **guard})
        for path in (path for path, (before, _) in files.items() if before):
            (kept / BEFORE / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / path, kept / BEFORE / path, follow_symlinks=False)
        os.rename(kept / AFTER / TE / NAME, location / OPEN)
        _exchange(location, AFTER)
        os.rename(location / OPEN, location / NAME)
    finally:
        roll_back(location)


def undo(source: Source) -> str:
    """Restore every changed module byte for byte, unless TE was reinstalled, and delete the added modules.

    Return a message for the user. Raise `BakeError` if there is no bake, `ManifestError` if a file was edited later.
    """
    location = Path(source.location)
    try:
        manifest = read_manifest(source)
        if manifest is None or not (location / BAKE_FOLDER).exists():
            advice = "To revert a patch, use `patch -p1 -R`; to remove an overlay, its mounts."
            raise BakeError(f"Nothing to undo: {location} has not been baked. {advice}")
        done = f"Undid the bake of {manifest.by}: {len(manifest.files)} modules restored or deleted in {location}"
    except ReinstalledError:
        shutil.rmtree(location / BAKE_FOLDER, ignore_errors=True)  # copies of the TE before the reinstall
        (location / BAKE_FOLDER).mkdir()
        done = f"Deleted the remains of an earlier bake in {location}"
    os.rename(location / NAME, location / OPEN)
    roll_back(location)  # an undo treats a finished bake as an interrupted one
    return done


def roll_back(location: Path) -> bool:
    """Roll back an unfinished bake, or finish an unfinished undo. Return whether there was either."""
    if not (location / BAKE_FOLDER).exists() or (location / NAME).exists():
        return False
    if (location / OPEN).exists():
        _exchange(location, BEFORE)
    shutil.rmtree(location / BAKE_FOLDER)
    return True


def write_files(folder: Path, root: Path, files: Mapping[str, tuple[str, str]]) -> None:
    """Write the new texts to a folder, with the permissions of the old files (for new files, of ``__init__.py``)."""
    for path, (before, after) in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(after.encode())
        shutil.copymode(root / (path if before else f"{TE}/__init__.py"), folder / path)


def _exchange(location: Path, side: str) -> None:
    """Move the files of one side (``before`` or ``after``) into place, unless they are there already.

    During the move, a guard replaces the first module. Every import of TE reaches the guard, which raises an error.
    """
    root, new = location.parent, location / BAKE_FOLDER / side
    files = Manifest.read(location / OPEN).files
    gate = next(path for path, (before, _) in files.items() if before)
    others = [path for path in files if path != gate]
    for name, path in [(GUARD, gate), *((path, path) for path in others), (gate, gate)]:
        if os.path.lexists(new / name):
            for compiled in (root / path).parent.glob(f"__pycache__/{Path(path).stem}.*.pyc"):
                compiled.unlink()  # Python may use the bytecode without comparing it with the text
            os.replace(new / name, root / path)
        elif side == BEFORE and files[path][0] is None:
            (root / path).unlink(missing_ok=True)
