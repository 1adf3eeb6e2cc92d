"""Write the fixes into files of TransformerEngine (TE), into a folder for ``bake --overlay``, or as a diff.

A bake in place first writes each new text next to its module. It then renames the manifest into place and, for each
module, links the original and renames the new text over the module. Added modules come first, because changed modules
import them, and graph.py comes last, because its changes activate the changes of other modules. TE can therefore be
imported after each rename, and its eager training does not change. An undo renames the originals back in reverse order.
It also runs after an error or a signal, and at the start of the next ``bake`` if a bake or an undo was killed.
"""

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
from ..manifest import NAME, BakeError, Manifest, digest, file_digest
from ..patching import PACKAGE, TE
from ..patching.installation import changed_functions, patched
from ..patching.source import ModuleSource, Source
from ..status import Status
from ..version import __version__

MARK = ".te-graph-fixes-"
ORIGINAL, NEW = f"{MARK}original", f"{MARK}new"
_GRAPH = f"{PACKAGE.replace('.', '/')}/graph.py"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def baked_files(decision: Decision) -> dict[str, tuple[str, str]]:
    """Return, for the manifest and every module that the fixes change or add, the texts before and after a bake.

    The keys are paths relative to the folder that contains TE, in the order in which a bake renames the files. The text
    before is "" for an added file. The result is {} if there is nothing to fix.
    """
    source, root, files = decision.source, Path(decision.source.location).parent, {}
    for name, texts in patched(source, decision.to_apply).items():
        files[f"{name.replace('.', '/')}.py"] = texts
    if not files:
        return {}
    files = {path: files[path] for path in sorted(files, key=lambda path: (files[path][0] > "", path == _GRAPH, path))}
    digests = {path: (file_digest(root / path), digest(after.encode())) for path, (_, after) in files.items()}
    statuses = {fix_id: str(fix.status) for fix_id, fix in decision.fixes.items()}
    statuses |= dict.fromkeys(decision.to_apply, str(Status.APPLIED))
    functions = changed_functions(source, decision.to_apply)
    manifest = Manifest(__version__, source.version, statuses, digests, functions)
    return {f"{TE}/{NAME}": ("", manifest.to_json()), **files}


def unified(decision: Decision) -> Iterator[str]:
    """Yield the lines of a diff for ``patch -p1``. Mark the last line of a file if it lacks a line break."""
    for path, texts in baked_files(decision).items():
        before, after = (io.StringIO(text, newline="").readlines() for text in texts)
        for line in difflib.unified_diff(before, after, f"a/{path}" if before else "/dev/null", f"b/{path}"):
            yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


@contextlib.contextmanager
def locked(location: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Lock TE's folder. If another process has locked it, call ``note`` and wait. Raise `BakeError` after a minute."""
    folder = os.open(location, os.O_RDONLY)
    try:
        for second in range(60):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            holder = _lock_holder(folder)
            if second == 0:
                note(f"Waiting for {holder}, which has locked {location}.")
            time.sleep(1)
        else:
            raise BakeError(f"Nothing was changed, because {holder} still has {location} locked. Try again later.")
        yield
    finally:
        os.close(folder)


def _lock_holder(folder: int) -> str:
    """Return "process N" for the process that has locked an open folder, or "another process" if N is unknown."""
    with contextlib.suppress(OSError):
        lock = rf" FLOCK .* (\d+) \S+:{os.fstat(folder).st_ino} "
        if found := re.search(lock, Path("/proc/locks").read_text()):
            return f"process {found[1]}"
    return "another process"


def write_in_place(source: Source, files: Mapping[str, tuple[str, str]]) -> None:
    """Write fixed modules and their manifest into the files of TE. After an error or signal, the caller must `undo`."""
    root = Path(source.location).parent
    _require_inside(source, files)
    write_files(root, root, files, NEW)
    for path, (before, _) in files.items():
        file, original = root / path, Path(f"{root / path}{ORIGINAL}")
        if before:
            original.unlink(missing_ok=True)
            os.link(file, original, follow_symlinks=False)
        _delete_bytecode(file)
        os.replace(f"{file}{NEW}", file)


def undo(source: Source, force: bool = False) -> str:
    """Restore every changed module byte for byte, and delete the added modules and the other files of a bake.

    Return a message for the user, or "" if there is no manifest. If another TE was installed over the bake, its modules
    stay. Raise `BakeError` if an original is missing, or if modules have changed since the bake and ``force`` is false.
    """
    location, root = Path(source.location), Path(source.location).parent
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a signal ends the process only after the undo
    try:
        for new in location.rglob(f"*{NEW}"):
            new.unlink()
        if (manifest := Manifest.read(location)) is None:
            return ""
        before = _digests_before(source, manifest, force)
        _require_inside(source, manifest.files)
        for path in reversed(manifest.files):
            file, original = root / path, Path(f"{root / path}{ORIGINAL}")
            if path in before:
                _delete_bytecode(file)
                os.replace(original, file) if before[path] else file.unlink()
            original.unlink(missing_ok=True)
        (location / NAME).unlink()
        return f"Undid the bake of {manifest.by}: {len(before)} modules restored or deleted in {location}"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def source_before(source: Source, manifest: Manifest) -> Source:
    """Return the source that an `undo` would restore, without changing files. Raise `BakeError` as `undo` does."""
    root, modules = Path(source.location).parent, dict[str, ModuleSource | None]()
    for path, before in _digests_before(source, manifest, force=False).items():
        name, file = path.removesuffix(".py").replace("/", "."), root / path
        modules[name] = ModuleSource.decoded(name, file, Path(f"{file}{ORIGINAL}").read_bytes()) if before else None
    return Source(source.location, source.version, modules)


def _digests_before(source: Source, manifest: Manifest, force: bool) -> dict[str, str | None]:
    """Return the digests of the originals (None: an added module) of the modules that an undo changes, by path."""
    root = Path(source.location).parent
    before = {path: manifest.files[path][0] for path in manifest.baked(source, force)}
    if lost := [path for path in before if before[path] not in (None, file_digest(f"{root / path}{ORIGINAL}"))]:
        raise BakeError(
            f"Nothing to undo: the originals of {', '.join(lost)} are missing or changed. To revert a patch, use "
            f"`patch -p1 -R`. To remove an overlay, remove its mounts. After a bake, reinstall TransformerEngine."
        )
    return before


def write_files(folder: Path, root: Path, files: Mapping[str, tuple[str, str]], suffix: str = "") -> None:
    """Write the new texts to a folder, with ``suffix`` after each name. Copy mode and owner from files in ``root``."""
    for path, (before, after) in files.items():
        file, model = Path(f"{folder / path}{suffix}"), root / (path if before else f"{TE}/__init__.py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)  # a link at this place could lead outside TE
        file.write_bytes(after.encode())
        shutil.copymode(model, file)
        with contextlib.suppress(PermissionError):  # only root may change the owner
            os.chown(file, model.stat().st_uid, model.stat().st_gid)


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
