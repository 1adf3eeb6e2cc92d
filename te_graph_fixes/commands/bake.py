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
import fcntl
import glob
import os
import platform
import re
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from ..decision import Decision
from ..manifest import AFTER, CHANGED, NAME, UNDO, Manifest, digest, file_digest, read_manifest
from ..patching import PACKAGE, TE
from ..patching.files import changed_code
from ..patching.installation import patched
from ..patching.source import Source
from ..status import Status
from ..version import __version__

ORIGINAL, NEW = ".te-graph-fixes-original", ".te-graph-fixes-new"
_GRAPH = f"{PACKAGE.replace('.', '/')}/graph.py"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class BakeError(Exception):
    """An error while changing or restoring TE's files. The files are unchanged unless the message states otherwise."""


def baked_files(decision: Decision) -> dict[str, tuple[str, str]]:
    """Return, for every module that the fixes change or add, its text before and after the bake ("" before: added).

    The keys are paths relative to the folder that contains TE, in the order in which a bake renames the files. The
    manifest is at the end. Each text has the line breaks of its file.
    """
    source, files = decision.source, {}
    for name, texts in patched(source, decision.to_apply).items():
        module = source.find(name)
        before, after = (text.replace("\n", module.newline if module else "\n") for text in texts)
        files[module_path(source, name)] = before, after
    if not files:
        return {}
    files = {path: files[path] for path in sorted(files, key=lambda path: (files[path][0] > "", path == _GRAPH, path))}
    root = Path(source.location).parent
    digests = {
        path: ((file_digest(root / path) or digest(before.encode())) if before else None, digest(after.encode()))
        for path, (before, after) in files.items()
    }
    statuses = {fix_id: str(verdict.status) for fix_id, verdict in decision.reading.verdicts.items()}
    statuses |= dict.fromkeys(decision.to_apply, str(Status.APPLIED))
    statuses |= dict.fromkeys(decision.disabled, str(Status.DISABLED))
    manifest = Manifest(
        __version__, decision.source.version, statuses, digests, *changed_code(source, decision.to_apply)
    )
    return {**files, f"{TE}/{NAME}": ("", manifest.to_json())}


def module_path(source: Source, module: str) -> str:
    """Return the path of a module's file, relative to the folder that contains TE."""
    file = source.find(module)
    return os.path.relpath(file.path, os.path.dirname(source.location)) if file else f"{module.replace('.', '/')}.py"


@contextlib.contextmanager
def locked(location: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Lock the TE in a folder for this process. Wait up to a minute for another process, and name it with ``note``."""
    folder, end, holder = os.open(location, os.O_RDONLY), time.monotonic() + 60, ""
    try:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if not holder:
                holder = _lock_holder(folder)
                note(f"Waiting for {holder}, which has locked {location}.")
            if time.monotonic() > end:
                raise BakeError(f"Nothing was changed, because {holder} still has {location} locked. Try again later.")
            time.sleep(0.1)
        yield
    finally:
        os.close(folder)


def _lock_holder(folder: int) -> str:
    """Name the process that has locked an open folder. It is unknown if it runs on another host, or as another user."""
    lock = re.compile(rf"^lock:.* FLOCK .*:{os.fstat(folder).st_ino} ", re.MULTILINE)
    for info in glob.iglob("/proc/[0-9]*/fdinfo/*"):
        with contextlib.suppress(OSError):
            if lock.search(Path(info).read_text()):
                return f"process {info.split('/')[2]} on {platform.node()}"
    return "another process"


def write_in_place(source: Source, files: Mapping[str, tuple[str, str]]) -> None:
    """Write fixed modules and their manifest into the files of TE. After an error or a signal, TE is unchanged."""
    root, (*modules, manifest) = Path(source.location).parent, files
    _require_inside(source, modules)
    with _signals_held():
        try:
            write_files(root, root, {manifest: files[manifest]}, NEW)
            os.replace(f"{root / manifest}{NEW}", root / manifest)
            for file in (root / path for path in modules if files[path][0]):
                Path(f"{file}{ORIGINAL}").unlink(missing_ok=True)
                shutil.copy2(file, f"{file}{ORIGINAL}", follow_symlinks=False)
                _copy_owner(file, f"{file}{ORIGINAL}")
            write_files(root, root, {path: files[path] for path in modules}, NEW)
            for path in modules:
                _delete_bytecode(root / path)
                os.replace(f"{root / path}{NEW}", root / path)
                if signal.sigpending() & set(_SIGNALS):
                    raise BakeError("Nothing was changed, because a signal interrupted the bake.")
        except BaseException:
            undo(source)
            raise


def undo(source: Source, force: bool = False) -> str:
    """Restore every changed module byte for byte, and delete the added modules.

    Return a message for the user; "" if there is no manifest. If another TE was installed over the bake, its modules
    stay. Raise `ManifestError` if modules have changed since the bake, unless ``force`` discards these changes.
    """
    location = Path(source.location)
    Path(f"{location / NAME}{NEW}").unlink(missing_ok=True)
    if (manifest := Manifest.read(location)) is None:
        return ""
    states = manifest.states(location.parent)
    restored = {AFTER} if manifest.is_overwritten(source.version, states) else {AFTER, CHANGED}
    if CHANGED in states.values() and CHANGED in restored and not force:
        read_manifest(source)  # raises an error that names the modules
    modules = [path for path, state in states.items() if state in restored]
    originals = {path: file_digest(f"{location.parent / path}{ORIGINAL}") for path in modules}
    if lost := [path for path, original in originals.items() if manifest.files[path][0] not in (original, None)]:
        raise BakeError(
            f"Nothing to undo: the originals of {', '.join(lost)} are missing or changed. To revert a patch, use "
            f"`patch -p1 -R`; to remove an overlay, its mounts. After a bake, reinstall TransformerEngine."
        )
    _require_inside(source, manifest.files)
    with _signals_held():
        _restore(location, manifest, modules)
    return f"Undid the bake of {manifest.by}: {len(modules)} modules restored or deleted in {location}"


def _restore(location: Path, manifest: Manifest, modules: Collection[str]) -> None:
    """Restore or delete these modules. Then delete everything else that the bake wrote, and the manifest at the end."""
    try:
        for path, (before, _) in reversed(manifest.files.items()):
            file, original = location.parent / path, Path(f"{location.parent / path}{ORIGINAL}")
            if path in modules:
                _delete_bytecode(file)
                os.replace(original, file) if before else file.unlink()
            original.unlink(missing_ok=True)
            Path(f"{file}{NEW}").unlink(missing_ok=True)
        (location / NAME).unlink()
    except OSError as error:
        raise BakeError(
            f"Cannot restore {error.filename2 or error.filename}: {error.strerror}. TransformerEngine can be imported, "
            f"but the fixes are in some of its modules. Correct the cause, and run:\n  {UNDO}"
        ) from error


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


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Deliver signals only after the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
