"""Corrections on disk: what ``te-graph-fixes diff`` prints, ``bake`` puts in place, and ``bake --overlay`` lays beside.

A bake in place is all or nothing. In the package folder of TransformerEngine (TE) stands, while it goes on,

    .te-graph-fixes.part    new files and links to the old ones are being gathered; TE is as it was
    .te-graph-fixes.open    files are being exchanged; until the end TE cannot be imported and says why
    .te-graph-fixes         it is done; the old files are kept for ``bake --undo``

and the next call after one that was killed deletes the first, or takes back by the second what was done.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import py_compile
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from . import __version__
from .engine import patched
from .fix import NOT_APPLICABLE, NOT_NEEDED, UNRECOGNIZED
from .source import Source
from .stamp import MADE, MODULES, OPEN, PACKAGE, ChangedStampError, Stamp, of_tree
from .verdicts import Decision

PART, KEPT = ".te-graph-fixes.part", ".te-graph-fixes"
MANIFEST = "MANIFEST.json"
_INIT = "pytorch/__init__.py"
_GUARD = """\
raise RuntimeError(
    "`te-graph-fixes bake` is changing this TransformerEngine, or was interrupted: if it does not run, start it again"
)
"""


class BakeError(Exception):
    """TE on disk cannot be changed, or not be changed back; it is as it was."""


@dataclass(frozen=True)
class Corrected:
    """A module of TE as text, ``before`` ("": there is none) and ``after``, below which is a stamp.

    ``path`` begins with ``transformer_engine/``; ``newline`` is the line break of the file.
    """

    path: str
    before: str
    after: str
    newline: str

    @property
    def data(self) -> bytes:
        """The new content of the file."""
        return self.after.replace("\n", self.newline).encode()


@dataclass(frozen=True)
class Changed:
    """One file of a bake: its path, and the SHA-256 of what was there (None: nothing) and of what is there now.

    ``bytecode`` are the names of the compiled files that were there.
    """

    path: str
    original: str | None
    result: str
    bytecode: Sequence[str] = ()


def corrected(decision: Decision) -> list[Corrected]:
    """Every module that the fixes to be applied change or add, with its stamp, in the order of the paths."""
    texts = patched(decision.source, decision.to_apply.values())
    words: dict[str, list[str]] = {MADE: [*decision.to_apply], NOT_NEEDED: [], NOT_APPLICABLE: []}
    for fix_id, verdict in decision.verdicts.items():
        if verdict.verdict in words:
            words[verdict.verdict].append(fix_id)
    words[MODULES] = [name.removeprefix(f"{PACKAGE}.") for name in sorted(texts)]
    stamp = Stamp(__version__, {word: tuple(names) for word, names in words.items() if names})
    files = []
    for name, (before, after) in texts.items():
        here = tuple(fix_id for fix_id, verdict in decision.to_apply.items() if name in verdict.targets)
        module = decision.source.find(name)
        newline = module.newline if module else "\n"
        files.append(Corrected(module_path(decision.source, name), before, stamp.below(after, here), newline))
    return sorted(files, key=lambda each: each.path)


def module_path(source: Source, module: str) -> str:
    """The path of a module's file, from the folder that holds TE."""
    found = source.find(module)
    parts = module.split(".")
    if found is not None and os.path.basename(found.path) == "__init__.py":
        parts.append("__init__")
    return str(PurePosixPath(*parts)) + ".py"


def require_whole(decision: Decision) -> None:
    """Raise `BakeError` where a fix that TE needs cannot be applied, or another version has corrected TE on disk."""
    unknown = [fix_id for fix_id, verdict in decision.decisions.items() if verdict.verdict == UNRECOGNIZED]
    try:
        stamp = of_tree(decision.source.location)
    except ChangedStampError as error:
        raise BakeError(str(error)) from error
    if stamp and (stamp.version != __version__ or unknown):
        lacks = f" without {', '.join(unknown)}" if unknown else ""
        raise BakeError(
            f"te-graph-fixes {stamp.version} has corrected {decision.source.location} on disk{lacks}. "
            "Take that back with `te-graph-fixes bake --undo` (a patch with `patch -p1 -R`), then bake again"
        )
    if unknown:
        reasons = "; ".join(f"{fix_id}: {decision.decisions[fix_id].reason}" for fix_id in unknown)
        raise BakeError(f"nothing was changed, since not every fix that is needed can be applied. {reasons}")


def in_place(decision: Decision) -> list[Changed]:
    """Write every corrected module into TE, or change nothing and raise `BakeError`; returns the files."""
    location = Path(decision.source.location)
    files = {_inside(each.path): each.data for each in corrected(decision)}
    part, opened = location / PART, location / OPEN
    if not files:
        return []
    if (location / KEPT).exists():
        raise BakeError(f"{location / KEPT} is left from an earlier bake: `te-graph-fixes bake --undo` first")
    try:
        changed = _gather(location, files)
        os.rename(part, opened)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise BakeError(_cannot_write(location, error)) from error
    try:
        _exchange(location, changed)
        shutil.rmtree(opened / "new")
        os.rename(opened, location / KEPT)
    except BaseException as error:
        recover(location)
        if isinstance(error, OSError):
            raise BakeError(_cannot_write(location, error)) from error
        raise
    return changed


def recover(location: Path) -> bool:
    """Take back what an interrupted bake, or an interrupted undo, has left; whether there was any."""
    part, opened = location / PART, location / OPEN
    found = part.exists() or opened.exists()
    try:
        if opened.exists():
            _restore(location)
            os.rename(opened, part)
        if part.exists():
            shutil.rmtree(part)
    except OSError as error:
        raise BakeError(f"{location} is half changed and cannot be put back: {error}. Then start this again") from error
    return found


def undo(location: Path) -> list[Changed]:
    """Give every file that `in_place` changed its very bytes back, and delete those that it added.

    Raises `BakeError` where somebody has changed them since. Where TE was installed anew over them, what is deleted are
    only the modules that were added.
    """
    kept, opened = location / KEPT, location / OPEN
    if not kept.exists():
        raise BakeError(
            f"no bake to undo in {location}: what `te-graph-fixes diff | patch` has changed, `patch -R` changes back"
        )
    changed = _read_manifest(kept)
    found = {each.path: _sha256_of(location / each.path) for each in changed}
    ours = [each for each in changed if each.original != each.result and found[each.path] == each.result]
    others = [each.path for each in changed if found[each.path] not in (each.original, each.result)]
    if others and any(each.original for each in ours):
        raise BakeError(f"{', '.join(others)} in {location} changed after the bake: put that back first, then undo")
    if others:
        for each in ours:
            (location / each.path).unlink()
        shutil.rmtree(kept)
        return ours
    try:
        _write(kept / "guard.py", _GUARD.encode(), location / _INIT)
    except OSError as error:
        raise BakeError(_cannot_write(location, error)) from error
    os.rename(kept, opened)
    recover(location)
    return ours


@contextlib.contextmanager
def locked(location: Path) -> Iterator[None]:
    """Let one process at a time change the TE in a folder."""
    folder = os.open(location, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _gather(location: Path, files: dict[str, bytes]) -> list[Changed]:
    """Fill the folder `PART`: the new files, and the old ones, with their bytecode, as links or copies."""
    part, init = location / PART, location / _INIT
    (part / "new").mkdir(parents=True)
    changed = []
    for path in sorted({*files, _INIT}, key=lambda path: path == _INIT):  # it closes the guard
        old, new = location / path, part / "new" / path
        for each in (old, *_bytecode(old)):
            if each.exists():
                _keep(each, part / "old" / each.relative_to(location))
        if path in files:
            _write(new, files[path], old if old.exists() else init)
        else:
            _keep(old, new)
        py_compile.compile(str(new), str(_compiled(new)), str(old), doraise=True)
        names = [each.name for each in _bytecode(old)]
        changed.append(Changed(path, _sha256_of(old), str(_sha256_of(new)), names))
    _write(part / "guard.py", _GUARD.encode(), init)
    _write(part / MANIFEST, _as_json({"files": [asdict(each) for each in changed]}), init)
    return changed


def _exchange(location: Path, changed: Iterable[Changed]) -> None:
    opened = location / OPEN
    os.replace(opened / "guard.py", _target(location / _INIT))
    for each in changed:
        path = location / each.path
        for stale in _bytecode(path):
            stale.unlink()
        os.replace(opened / "new" / each.path, _target(path))
        compiled = _compiled(path)
        compiled.parent.mkdir(exist_ok=True)
        os.replace(_compiled(opened / "new" / each.path), compiled)


def _restore(location: Path) -> None:
    """Put the old files back, as many as are not there yet. It needs no space: it renames and deletes."""
    opened = location / OPEN
    guard, old = opened / "guard.py", opened / "old"
    if guard.exists():
        os.replace(guard, _target(location / _INIT))
    for each in _read_manifest(opened):
        path = location / each.path
        for compiled in _bytecode(path):
            if compiled.name not in each.bytecode:
                compiled.unlink()
        for compiled in _bytecode(old / each.path):
            os.replace(compiled, path.parent / "__pycache__" / compiled.name)
        if not each.bytecode:
            with contextlib.suppress(OSError):  # there is bytecode of other modules
                (path.parent / "__pycache__").rmdir()
        if each.original is None:
            path.unlink(missing_ok=True)
        elif (old / each.path).exists():
            os.replace(old / each.path, _target(path))


def _bytecode(path: Path) -> list[Path]:
    """The compiled files of a module, of any interpreter."""
    return sorted(path.parent.glob(f"__pycache__/{path.stem}.*.pyc"))


def _compiled(path: Path) -> Path:
    """Where this interpreter has the bytecode of a module."""
    return path.parent / "__pycache__" / os.path.basename(importlib.util.cache_from_source(path))


def _target(path: Path) -> Path:
    """The file that a path names, through links, which stay links."""
    return Path(os.path.realpath(path))


def _keep(path: Path, place: Path) -> None:
    """Another link to a file, or a copy where that cannot be."""
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(_target(path), place)
    except OSError:
        shutil.copy2(path, place)
        _own(place, path)


def _write(path: Path, data: bytes, like: Path) -> None:
    """A new file with the permissions and the owner of another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    shutil.copymode(like, path)
    _own(path, like)


def _own(path: Path, like: Path) -> None:
    status = like.stat()
    if (status.st_uid, status.st_gid) != (path.stat().st_uid, path.stat().st_gid):
        with contextlib.suppress(PermissionError):  # only root gives files away
            os.chown(path, status.st_uid, status.st_gid)


def _read_manifest(folder: Path) -> list[Changed]:
    return [Changed(**each) for each in json.loads((folder / MANIFEST).read_bytes())["files"]]


def _as_json(value: object) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def _sha256_of(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def _inside(path: str) -> str:
    return path.partition("/")[2]


def _cannot_write(location: Path, error: Exception) -> str:
    why = getattr(error, "strerror", None) or str(error)
    return (
        f"cannot write in {location}: {why}. Nothing was changed; `te-graph-fixes bake --overlay DIR` writes elsewhere"
    )


def overlay(decision: Decision, folder: Path) -> dict[str, Any]:
    """Write the corrected modules and ``MANIFEST.json`` into a folder, which is new, empty or an older overlay.

    Returns the manifest: versions, the fixes with their verdicts, the ``files`` as `Changed`, and the SHA-256 of the
    modules that were read and are right as they are.
    """
    files, source = corrected(decision), decision.source
    root = Path(source.location).parent
    if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
        raise BakeError(f"{folder} is not empty, and no overlay of te-graph-fixes: name another folder")
    read = {module_path(source, name) for name in decision.modules if source.find(name)}
    manifest = {
        "te_graph_fixes_version": __version__,
        "te_version": source.version,
        "te_location": source.location,
        "fixes": {fix_id: verdict.verdict for fix_id, verdict in decision.decisions.items()},
        "files": [
            {
                "path": each.path,
                "original": _sha256_of(root / each.path),
                "result": hashlib.sha256(each.data).hexdigest(),
            }
            for each in files
        ],
        "unchanged": {path: _sha256_of(root / path) for path in sorted(read - {each.path for each in files})},
    }
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        for each in files:
            _write(part / each.path, each.data, root / "transformer_engine" / _INIT)
        _write(part / MANIFEST, _as_json(manifest), root / "transformer_engine" / _INIT)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(part, folder)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise BakeError(f"cannot write {folder}: {error.strerror}") from error
    return manifest


def differences(source: Source, folder: Path) -> list[str]:
    """In what TE is not the one that an overlay was made of, with the overlay's files in place; [] if it is."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise BakeError(f"no overlay in {folder}: {error}") from error
    root, found = Path(source.location).parent, []
    if source.version != manifest["te_version"]:
        found.append(f"this is TransformerEngine {source.version}; the overlay is for {manifest['te_version']}")
    for each in _read_manifest(folder):
        here = _sha256_of(root / each.path)
        if _sha256_of(folder / each.path) != each.result:
            found.append(f"{folder / each.path} is not as it was written: make the overlay again")
        elif here == each.original:
            found.append(f"{root / each.path} is not mounted: TransformerEngine's own is there")
        elif here != each.result:
            found.append(f"{root / each.path} is neither the overlay's nor the one that it was made of")
    for path, digest in manifest["unchanged"].items():
        if _sha256_of(root / path) != digest:
            found.append(f"{root / path} is not the one that the overlay was made with: make the overlay again")
    return found


def mounts(folder: Path, manifest: dict[str, Any]) -> str:
    """How each container runtime puts the files of an overlay in the place of TE's."""
    root = PurePosixPath(manifest["te_location"]).parent
    pairs = [(folder / each["path"], root / each["path"]) for each in manifest["files"]]
    lines = [f"{old}:{new}" for old, new in pairs]
    volume = "".join(
        f"  - {{name: te-graph-fixes, mountPath: {new}, subPath: {old.relative_to(folder)}, readOnly: true}}\n"
        for old, new in pairs
    )
    return "\n".join(
        [
            "# docker, podman",
            " ".join(f"-v {line}:ro" for line in lines),
            "# pyxis: srun",
            f"--container-mounts={','.join(f'{line}:ro' for line in lines)}",
            "# enroot start",
            " ".join(f"--mount {line}" for line in lines),
            "# apptainer exec",
            f"--bind {','.join(f'{line}:ro' for line in lines)}",
            f"# Kubernetes: a volume te-graph-fixes that holds {folder}, and in the container",
            f"volumeMounts:\n{volume}",
        ]
    )
