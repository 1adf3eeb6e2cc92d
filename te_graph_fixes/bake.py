"""Corrections on disk: what ``te-graph-fixes diff`` prints, ``bake`` puts in place, and ``bake --overlay`` lays beside.

A bake in place is all or nothing. In the package folder of TransformerEngine (TE) stands, while it goes on,

    .te-graph-fixes.part    the new modules, and links to those that they replace, are being gathered; TE is as it was
    .te-graph-fixes.open    modules are being exchanged; until the end TE cannot be imported and says why
    .te-graph-fixes         it is done; the old modules are kept for ``bake --undo``

and the next call after one that was killed deletes the first, or takes back by the second what was done. Once the
folder is open files are renamed and deleted, and nothing is written: a full disk does not stop it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import py_compile
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import __version__
from .engine import patched
from .fix import NOT_APPLICABLE, NOT_NEEDED, UNRECOGNIZED
from .settings import chosen_by
from .source import TE, Source
from .stamp import MADE, MODULES, OPEN, PACKAGE, ChangedStampError, Stamp, of_tree
from .verdicts import Decision

PART, KEPT = ".te-graph-fixes.part", ".te-graph-fixes"
MANIFEST = "MANIFEST.json"
ORIGINAL, RESULT = "original", "result"
INIT = f"{TE}/pytorch/__init__.py"
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

    ``path`` is from the folder that holds TE; ``newline`` is the line break of the file.
    """

    path: str
    before: str
    after: str
    newline: str


@dataclass(frozen=True)
class Changed:
    """A module: its path from the folder that holds TE, and its SHA-256 before and after; None: there is none."""

    path: str
    original: str | None
    result: str | None


def corrected(decision: Decision) -> list[Corrected]:
    """Every module that the fixes to be applied change or add, with its stamp, in the order of the paths."""
    texts = patched(decision.source, decision.to_apply.values())
    facts = {MADE: tuple(decision.to_apply)}
    for word in (NOT_NEEDED, NOT_APPLICABLE):
        facts[word] = tuple(fix_id for fix_id, each in decision.verdicts.items() if each.verdict == word)
    facts[MODULES] = tuple(name.removeprefix(f"{PACKAGE}.") for name in sorted(texts))
    stamp = Stamp(__version__, {word: names for word, names in facts.items() if names})
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
    return os.path.relpath(found.path, os.path.dirname(source.location)) if found else f"{module.replace('.', '/')}.py"


def require_complete(decision: Decision) -> None:
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
        reasons = "; ".join(f"{', '.join(ids)}: {reason}" for reason, ids in decision.refused.items())
        why = decision.refusal or f"not every fix that is needed can be applied. {reasons}"
        raise BakeError(f"nothing was changed, because {why}")
    if decision.left_out and not (decision.to_apply or stamp):
        raise BakeError(f"nothing was changed: {len(decision.left_out)} fixes are left out by {chosen_by()}")


@contextlib.contextmanager
def locked(location: Path) -> Iterator[None]:
    """Let one process at a time change the TE in a folder."""
    folder = os.open(location, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def in_place(decision: Decision) -> list[Changed]:
    """Write every corrected module into TE, or change nothing and raise `BakeError`; returns the modules."""
    location = Path(decision.source.location)
    part, opened, kept = location / PART, location / OPEN, location / KEPT
    if not decision.to_apply:
        return []
    if kept.exists():
        raise BakeError(f"{kept} is left from an earlier bake: `te-graph-fixes bake --undo` first")
    with _writing(location):
        try:
            _gather(decision, part)
            os.rename(part, opened)
            _exchange(opened, RESULT)
            shutil.rmtree(opened / RESULT)
            os.rename(opened, kept)
        except BaseException:
            roll_back(location)
            raise
    return _changed(kept)


def undo(location: Path) -> list[Changed]:
    """Give every module that `in_place` changed its very bytes back, and delete those that it added.

    Raises `BakeError` where somebody has changed them since. Where TE was installed anew over them, what is deleted are
    only the modules that were added.
    """
    kept, root = location / KEPT, location.parent
    if not kept.exists():
        raise BakeError(
            f"no bake to undo in {location}: what `te-graph-fixes diff | patch` has changed, `patch -R` changes back"
        )
    found = {each: _sha256_of(root / each.path) for each in _changed(kept)}
    ours = [each for each, digest in found.items() if digest == each.result]
    others = [each.path for each, digest in found.items() if digest not in (each.original, each.result)]
    if others and any(each.original for each in ours):
        raise BakeError(
            f"{', '.join(others)} in {location} was edited after the bake: take the edit back, or "
            "install TransformerEngine anew, and undo again"
        )
    try:
        if not others:
            os.rename(kept, location / OPEN)
            roll_back(location)  # an undo is a bake that is taken back
            return ours
        for each in ours:  # TE was installed anew: of what is ours only added modules are left
            _delete(root / each.path)
        shutil.rmtree(kept)
    except OSError as error:
        raise BakeError(f"cannot change {error.filename}: {error.strerror}. Mend that, and undo again") from error
    return ours


def roll_back(location: Path) -> bool:
    """Take back what an interrupted bake, or an interrupted undo, has left; whether there was any."""
    part, opened = location / PART, location / OPEN
    found = part.exists() or opened.exists()
    try:
        if opened.exists():
            _exchange(opened, ORIGINAL)
            os.rename(opened, part)
        if part.exists():
            shutil.rmtree(part)
    except OSError as error:
        raise BakeError(f"{location} is half changed: {error}. Mend that, and start this again") from error
    return found


def _gather(decision: Decision, part: Path) -> None:
    """Fill the folder `PART`: the corrected modules with their bytecode, and links to, or copies of, what they replace.

    The guard that closes TE is there twice: once for the bake, once to take it back.
    """
    root = Path(decision.source.location).parent
    modules = _write_modules(decision, part / RESULT)
    if INIT not in modules:  # it makes way for the guard
        _link_or_copy(root / INIT, part / RESULT / INIT)
    modules = [*sorted({*modules} - {INIT}), INIT]
    for path in modules:
        py_compile.compile(str(part / RESULT / path), dfile=str(root / path), doraise=True)
        for old in (root / path, *_bytecode(root / path)):
            if old.exists():
                _link_or_copy(old, part / ORIGINAL / old.relative_to(root))
    for which in (ORIGINAL, RESULT):
        _write(part / which / "guard.py", _GUARD.encode(), root / INIT)
    _write_manifest(decision, part, modules, part / RESULT)


def _exchange(opened: Path, which: str) -> None:
    """Put the modules of one side in place with their bytecode, as far as they are not there yet."""
    root, side = opened.parent.parent, opened / which
    if (side / "guard.py").exists():
        _replace(side / "guard.py", root / INIT)
    for each in _read_manifest(opened)["files"]:
        staged, place = side / each.path, root / each.path
        if staged.exists() and not (place.exists() and staged.samefile(place)):
            _replace(staged, place)
        elif getattr(each, which) is None:
            _delete(place)
        for compiled in _bytecode(staged):
            place.with_name("__pycache__").mkdir(exist_ok=True)
            os.replace(compiled, place.parent / "__pycache__" / compiled.name)


def _replace(staged: Path, place: Path) -> None:
    """Exchange a module for another one, through links, which stay links; its bytecode first."""
    for compiled in _bytecode(place):
        compiled.unlink()
    os.replace(staged, place.resolve())


def _delete(module: Path) -> None:
    for path in (*_bytecode(module), module):
        path.unlink(missing_ok=True)


def _bytecode(module: Path) -> list[Path]:
    """The compiled files of a module, of any interpreter."""
    return sorted(module.parent.glob(f"__pycache__/{module.stem}.*.pyc"))


def _link_or_copy(path: Path, place: Path) -> None:
    """Another link to a file, or a copy where that cannot be."""
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path.resolve(), place)
    except OSError:
        shutil.copy2(path, place)
        _copy_owner(place, path)


def _write(path: Path, data: bytes, like: Path) -> None:
    """A new file with the permissions and the owner of another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    shutil.copymode(like, path)
    _copy_owner(path, like)


def _copy_owner(path: Path, like: Path) -> None:
    with contextlib.suppress(PermissionError):  # only root gives files away
        os.chown(path, like.stat().st_uid, like.stat().st_gid)


def _write_modules(decision: Decision, folder: Path) -> list[str]:
    """Write the corrected modules below a folder; returns their paths."""
    root, files = Path(decision.source.location).parent, corrected(decision)
    for each in files:
        like = root / (each.path if each.before else INIT)
        _write(folder / each.path, each.after.replace("\n", each.newline).encode(), like)
    return [each.path for each in files]


def _write_manifest(
    decision: Decision, folder: Path, modules: Iterable[str], results: Path, **more: object
) -> dict[str, Any]:
    """Write down what is made of TE, with the digests of its modules and of those in the folder ``results``."""
    source = decision.source
    root = Path(source.location).parent
    manifest: dict[str, Any] = {
        "te_graph_fixes_version": __version__,
        "te_version": source.version,
        "te_location": source.location,
        "fixes": {fix_id: verdict.verdict for fix_id, verdict in decision.decisions.items()},
        "files": [asdict(Changed(path, _sha256_of(root / path), _sha256_of(results / path))) for path in modules],
        **more,
    }
    _write(folder / MANIFEST, json.dumps(manifest, indent=2).encode() + b"\n", root / INIT)
    return manifest


def _read_manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    return {**manifest, "files": [Changed(**each) for each in manifest["files"]]}


def _changed(kept: Path) -> list[Changed]:
    """The modules that a bake changed or added."""
    return [each for each in _read_manifest(kept)["files"] if each.original != each.result]


def _sha256_of(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn an error of the disk into one that says so."""
    try:
        yield
    except OSError as error:
        where = f"cannot write in {folder}: {error.strerror}. Nothing was changed"
        raise BakeError(f"{where}; `te-graph-fixes bake --overlay DIR` writes elsewhere") from error


def overlay(decision: Decision, folder: Path) -> dict[str, Any]:
    """Write the corrected modules and ``MANIFEST.json`` into a folder, which is new, empty or an older overlay.

    Returns the manifest: versions, the fixes with their verdicts, the ``files`` as `Changed`, and the SHA-256 of the
    modules that were read and are right as they are.
    """
    source, part = decision.source, folder.with_name(folder.name + ".part")
    root = Path(source.location).parent
    if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
        raise BakeError(f"{folder} is not empty, and no overlay of te-graph-fixes: name another folder")
    read = {module_path(source, name) for name in decision.modules if source.find(name)}
    with _writing(folder.parent):
        shutil.rmtree(part, ignore_errors=True)
        modules = _write_modules(decision, part)
        unchanged = {path: _sha256_of(root / path) for path in sorted(read - {*modules})}
        manifest = _write_manifest(decision, part, modules, part, unchanged=unchanged)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(part, folder)
    return manifest


def differences(source: Source, folder: Path) -> list[str]:
    """In what TE is not the one that an overlay was made of, with the overlay's files in place; [] if it is."""
    try:
        manifest = _read_manifest(folder)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise BakeError(f"no overlay in {folder}: {MANIFEST}: {why}") from error
    root, found, unmounted = Path(source.location).parent, [], []
    if source.version != manifest["te_version"]:
        found.append(f"this is TransformerEngine {source.version}; the overlay is for {manifest['te_version']}")
    for each in manifest["files"]:
        here = _sha256_of(root / each.path)
        if _sha256_of(folder / each.path) != each.result:
            found.append(f"{folder / each.path} is not as it was written: make the overlay again")
        elif here == each.original:
            unmounted.append(root / each.path)
        elif here != each.result:
            found.append(f"{root / each.path} is neither the overlay's nor the one that it was made of")
    for path, digest in manifest["unchanged"].items():
        if _sha256_of(root / path) != digest:
            found.append(f"{root / path} is not the one that the overlay was made with: make the overlay again")
    if unmounted:
        files, advice = len(manifest["files"]), "mount what `te-graph-fixes bake --overlay` printed"
        found.append(f"{len(unmounted)} of {files} files are not mounted, first {unmounted[0]}: {advice}")
    return found


def mounts(folder: Path, manifest: dict[str, Any]) -> str:
    """How each container runtime puts the files of an overlay in the place of TE's."""
    root, paths = Path(manifest["te_location"]).parent, [each["path"] for each in manifest["files"]]
    binds = [f"{folder / path}:{root / path}" for path in paths]
    read_only = ",".join(f"{bind}:ro" for bind in binds)
    volume = [f"{{name: te-graph-fixes, mountPath: {root / path}, subPath: {path}, readOnly: true}}" for path in paths]
    lines = {
        "docker, podman": " ".join(f"-v {bind}:ro" for bind in binds),
        "pyxis: srun": f"--container-mounts={read_only}",
        "enroot start": " ".join(f"--mount {bind}" for bind in binds),
        "apptainer exec": f"--bind {read_only}",
        f"Kubernetes: a volume te-graph-fixes that holds {folder}, and in the container": "\n  - ".join(
            ["volumeMounts:", *volume]
        ),
    }
    return "\n".join(f"# {runtime}\n{options}" for runtime, options in lines.items())
