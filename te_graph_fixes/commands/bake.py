"""Write the fixes into files of TransformerEngine (TE): in place for ``bake``, in a folder for ``bake --overlay``.

A bake in place first writes these files:

    te-graph-fixes.json                 the manifest, with the digests of each module before and after the bake
    graph.py.te-graph-fixes-original    a copy of each module that will change, beside it
    graph.py.te-graph-fixes-new         the new text of each changed or added module, beside its place

Then it renames each new text to its module. The added modules come first, because the others import them, and graph.py
comes last, because it activates what the others contain. So TE can be imported after each rename, and computes the same
without graphs. An undo renames the copies to their modules, in the reverse order. It runs for ``bake --undo``, after an
error or a signal, and, if a bake or an undo was killed, at the start of the next command.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import io
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from ..decision import Decision
from ..manifest import NAME, UNDO, Manifest, digest, file_digest, read_manifest
from ..patching import PACKAGE, TE
from ..patching.files import changed_code
from ..patching.installation import patched
from ..patching.source import Source
from ..status import Status
from ..version import __version__

ORIGINAL, NEW = ".te-graph-fixes-original", ".te-graph-fixes-new"
_GRAPH = f"{PACKAGE.replace('.', '/')}/graph.py"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class BakeError(Exception):
    """An error while changing or restoring TE's files. The files are unchanged unless the message states otherwise."""


def baked_files(decision: Decision) -> dict[str, tuple[str, str]]:
    """Return, for every module that the fixes change or add, its text before and after the bake ("" before: added).

    The keys are paths relative to the folder that contains TE, in the order in which a bake renames the files. The
    manifest is at the end. Each text has the line breaks of its file.
    """
    source, root, files = decision.source, Path(decision.source.location).parent, {}
    for name, texts in patched(source, decision.to_apply).items():
        module = source.find(name)
        before, after = (text.replace("\n", module.newline if module else "\n") for text in texts)
        files[module_path(source, name)] = before, after
    if not files:
        return {}
    files = {path: files[path] for path in sorted(files, key=lambda path: (files[path][0] > "", path == _GRAPH, path))}
    digests = {
        path: ((file_digest(root / path) or digest(before.encode())) if before else None, digest(after.encode()))
        for path, (before, after) in files.items()
    }
    statuses = {fix_id: str(fix.status) for fix_id, fix in decision.fixes.items()}
    statuses |= dict.fromkeys(decision.to_apply, str(Status.APPLIED))
    code = changed_code(source, decision.to_apply)
    return {**files, f"{TE}/{NAME}": ("", Manifest(__version__, source.version, statuses, digests, code).to_json())}


def module_path(source: Source, module: str) -> str:
    """Return the path of a module's file, relative to the folder that contains TE."""
    file = source.find(module)
    return os.path.relpath(file.path, os.path.dirname(source.location)) if file else f"{module.replace('.', '/')}.py"


@contextlib.contextmanager
def locked(location: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Lock the TE in a folder for this process. Wait up to a minute for another process, and name it with ``note``."""
    folder, holder = os.open(location, os.O_RDONLY), ""
    try:
        for _ in range(600):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if not holder:
                holder = _lock_holder(folder)
                note(f"Waiting for {holder}, which has locked {location}.")
            time.sleep(0.1)
        else:
            raise BakeError(f"Nothing was changed, because {holder} still has {location} locked. Try again later.")
        yield
    finally:
        os.close(folder)


def _lock_holder(folder: int) -> str:
    """Name the process that has locked an open folder. It is unknown if it runs on another host."""
    with contextlib.suppress(OSError):
        lock = rf" FLOCK .* (\d+) \S+:{os.fstat(folder).st_ino} "
        if found := re.search(lock, Path("/proc/locks").read_text()):
            return f"process {found[1]}"
    return "another process"


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Deliver signals only after the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@_signals_held()
def write_in_place(source: Source, files: Mapping[str, tuple[str, str]]) -> None:
    """Write fixed modules and their manifest into the files of TE. After an error or a signal, call `undo`."""
    root, (*modules, manifest) = Path(source.location).parent, files
    _require_inside(source, modules)
    write_files(root, root, {manifest: files[manifest]}, NEW)
    os.replace(f"{root / manifest}{NEW}", root / manifest)
    for file in (root / path for path in modules if files[path][0]):
        Path(f"{file}{ORIGINAL}").unlink(missing_ok=True)
        shutil.copy2(file, f"{file}{ORIGINAL}", follow_symlinks=False)
        _copy_owner(file, f"{file}{ORIGINAL}")
    write_files(root, root, {path: files[path] for path in modules}, NEW)
    for file in (root / path for path in modules):
        _delete_bytecode(file)
        os.replace(f"{file}{NEW}", file)


@_signals_held()
def undo(source: Source, force: bool = False) -> str:
    """Restore every changed module byte for byte, and delete the added modules and the other files of a bake.

    Return a message for the user; "" if there is no manifest. If another TE was installed over the bake, its modules
    stay. Raise `ManifestError` if modules have changed since the bake, unless ``force`` discards these changes.
    """
    location, root = Path(source.location), Path(source.location).parent
    Path(f"{location / NAME}{NEW}").unlink(missing_ok=True)
    if (manifest := Manifest.read(location)) is None:
        return ""
    baked, changed = manifest.modules(source)
    if changed and not force:
        read_manifest(source)  # raises an error that names the modules
    before = {path: manifest.files[path][0] for path in (*baked, *changed)}
    if lost := [path for path in before if before[path] not in (None, file_digest(f"{root / path}{ORIGINAL}"))]:
        raise BakeError(
            f"Nothing to undo: the originals of {', '.join(lost)} are missing or changed. To revert a patch, use "
            f"`patch -p1 -R`; to remove an overlay, its mounts. After a bake, reinstall TransformerEngine."
        )
    _require_inside(source, manifest.files)
    try:
        for path in reversed(manifest.files):
            file, original = root / path, Path(f"{root / path}{ORIGINAL}")
            if path in before:
                _delete_bytecode(file)
                os.replace(original, file) if before[path] else file.unlink()
            original.unlink(missing_ok=True)
            Path(f"{file}{NEW}").unlink(missing_ok=True)
        (location / NAME).unlink()
    except OSError as error:
        left = f"{len(manifest.modules(source)[0])} of {len(manifest.files)} modules are baked"
        raise BakeError(
            f"Cannot restore {error.filename2 or error.filename}: {error.strerror}. TransformerEngine can be imported; "
            f"{left}. Correct the cause, and run:\n  {UNDO}"
        ) from error
    return f"Undid the bake of {manifest.by}: {len(before)} modules restored or deleted in {location}"


def write_files(folder: Path, root: Path, files: Mapping[str, tuple[str, str]], suffix: str = "") -> None:
    """Write the new texts to a folder, with the permissions of the old files (for new files, of ``__init__.py``)."""
    for path, (before, after) in files.items():
        file, model = Path(f"{folder / path}{suffix}"), root / (path if before else f"{TE}/__init__.py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)  # a link at this place could lead outside TE
        file.write_bytes(after.encode())
        shutil.copymode(model, file)
        _copy_owner(model, file)


def _copy_owner(model: Path, file: str | Path) -> None:
    with contextlib.suppress(PermissionError):  # only root may do this
        os.chown(file, model.stat().st_uid, model.stat().st_gid, follow_symlinks=False)


def _delete_bytecode(file: Path) -> None:
    """Delete the bytecode of a module, because Python may use it without comparing it with the text."""
    for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
        compiled.unlink()


def _require_inside(source: Source, paths: Iterable[str]) -> None:
    """Raise `BakeError` if the folder or the bytecode of a module is outside TE, because of a link."""
    location = Path(source.location)
    for folder in {(location.parent / path).parent for path in paths}:
        for written in (folder.resolve(), (folder / "__pycache__").resolve()):
            if not written.is_relative_to(location.resolve()):
                raise BakeError(f"Nothing was changed, because {folder} leads outside TransformerEngine, to {written}.")


def unified(decision: Decision) -> Iterator[str]:
    """Yield the lines of a diff for ``patch -p1``. Mark the last line of a file if it lacks a line break."""
    for path, texts in baked_files(decision).items():
        before, after = (io.StringIO(text, newline="").readlines() for text in texts)
        for line in difflib.unified_diff(before, after, f"a/{path}" if before else "/dev/null", f"b/{path}"):
            yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
