"""Corrections on disk: what ``te-graph-fixes diff`` prints, ``bake`` puts in place, and ``bake --overlay`` lays beside.

A bake in place is all or nothing. In the package folder of TransformerEngine (TE) stands

    .te-graph-fixes.open    while it goes on: the new modules, and links to those that they replace. Once its manifest
                            is written, modules are exchanged; until the end TE cannot be imported and says why
    .te-graph-fixes         when it is done: the old modules are kept for ``bake --undo``

and the next call after one that was killed takes back what was done, and deletes the first. Once there is a manifest
files are renamed and deleted, and nothing is written: a full disk does not stop it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import py_compile
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..decision import Decision
from ..fix import NOT_APPLICABLE, NOT_NEEDED
from ..patching.installation import patched
from ..patching.source import TE, Source
from ..stamp import MADE, MODULES, OPEN, PACKAGE, Stamp, above, of_tree

KEPT = ".te-graph-fixes"
MANIFEST, GUARD = "MANIFEST.json", "guard"
ORIGINAL, RESULT = "original", "result"
INIT = f"{TE}/pytorch/__init__.py"
_CLOSED = b"""\
raise RuntimeError(
    "`te-graph-fixes bake` is changing this TransformerEngine, or was interrupted: if it does not run, start it again"
)
"""


class BakeError(Exception):
    """TE on disk cannot be changed, or not be changed back; it is as it was."""


@dataclass(frozen=True)
class Corrected:
    """A module of TE as text, ``before`` ("": there is none) and ``after``, below which is a stamp.

    ``path`` is from the folder that holds TE; line breaks are those of the file.
    """

    path: str
    before: str
    after: str


def corrected(decision: Decision) -> list[Corrected]:
    """Every module that the fixes to be applied change or add, with its stamp, in the order of the paths."""
    texts = patched(decision.source, decision.to_apply.values())
    facts = {MADE: tuple(decision.to_apply)}
    for word in (NOT_NEEDED, NOT_APPLICABLE):
        facts[word] = tuple(fix_id for fix_id, each in decision.verdicts.items() if each.verdict == word)
    facts[MODULES] = tuple(name.removeprefix(f"{PACKAGE}.") for name in sorted(texts))
    stamp = Stamp(__version__, facts)
    files = []
    for name, (before, after) in texts.items():
        here = tuple(fix_id for fix_id, verdict in decision.to_apply.items() if name in verdict.targets)
        module = decision.source.find(name)
        end = module.newline if module else "\n"
        stamped = stamp.below(after, here).replace("\n", end)
        files.append(Corrected(module_path(decision.source, name), before.replace("\n", end), stamped))
    return sorted(files, key=lambda each: each.path)


def module_path(source: Source, module: str) -> str:
    """The path of a module's file, from the folder that holds TE."""
    found = source.find(module)
    return os.path.relpath(found.path, os.path.dirname(source.location)) if found else f"{module.replace('.', '/')}.py"


def require_complete(decision: Decision) -> None:
    """Raise `BakeError` where a fix that TE needs cannot be applied, or another version has corrected TE on disk.

    It is raised, too, where the settings leave out all that TE needs.
    """
    location, stamp = decision.source.location, of_tree(decision.source.location)
    refused = [fix_id for ids in decision.refused.values() for fix_id in ids]
    if stamp and (stamp.version != __version__ or refused):
        lacks = f" without {', '.join(refused)}" if refused else ""
        raise BakeError(
            f"te-graph-fixes {stamp.version} has corrected {location} on disk{lacks}. "
            "Take that back with `te-graph-fixes bake --undo` (a patch with `patch -p1 -R`), then bake again"
        )
    if refused:
        reasons = "; ".join(f"{', '.join(ids)}: {reason}" for reason, ids in decision.refused.items())
        why = decision.refusal or f"not every fix that is needed can be applied. {reasons}"
        raise BakeError(f"nothing was changed, because {why}")
    if decision.left_out and not (decision.to_apply or stamp):
        by = decision.settings.chosen_by
        raise BakeError(f"nothing was changed: {len(decision.left_out)} fixes are left out by {by}")


@contextlib.contextmanager
def changing(location: Path) -> Iterator[bool]:
    """Let one process at a time change the TE in a folder. Yields whether it took back what another had left."""
    folder = os.open(location, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield roll_back(location)
    finally:
        os.close(folder)


def in_place(decision: Decision) -> int:
    """Write every corrected module into TE, or change nothing and raise `BakeError`; returns how many there are."""
    location = Path(decision.source.location)
    opened, kept = location / OPEN, location / KEPT
    if not decision.to_apply:
        return 0
    if kept.exists():
        raise BakeError(f"{kept} is left from an earlier bake: `te-graph-fixes bake --undo` first")
    try:
        with _disk(location, "Nothing was changed; `te-graph-fixes bake --overlay DIR` writes elsewhere"):
            _gather(decision, opened)
            _exchange(opened, RESULT)
            os.rename(opened, kept)
    finally:
        roll_back(location)
    return len(_read(kept)["files"])


def undo(location: Path) -> int:
    """Give every module that `in_place` changed its very bytes back, and delete those that it added; returns how many.

    Raises `BakeError` where somebody has changed them since. Where TE was installed anew over them, what is deleted are
    only the modules that were added.
    """
    kept, root = location / KEPT, location.parent
    if not kept.exists():
        raise BakeError(
            f"no bake to undo in {location}: what `te-graph-fixes diff | patch` has changed, `patch -R` changes back"
        )
    files = _read(kept)["files"]
    here = {each["path"]: _sha256_of(root / each["path"]) for each in files}
    ours = [each for each in files if here[each["path"]] == each[RESULT]]
    others = [each["path"] for each in files if here[each["path"]] not in (each[ORIGINAL], each[RESULT])]
    if INIT not in here and _sha256_of(root / INIT) != _sha256_of(kept / ORIGINAL / INIT):
        others.append(INIT)
    is_same_te = any(each[ORIGINAL] for each in ours) or any(_is_stamped(root / path) for path in others)
    if others and is_same_te:
        raise BakeError(
            f"{', '.join(others)} in {location} was edited after the bake: take the edit back, or "
            "install TransformerEngine anew, and undo again"
        )
    with _disk(location, "Mend that, and undo again"):
        if others:  # TE was installed anew: of what is ours only added modules are left
            shutil.rmtree(kept / ORIGINAL, ignore_errors=True)
        os.rename(kept, location / OPEN)
    roll_back(location)  # an undo is a bake that is taken back
    return len(ours)


def _is_stamped(path: Path) -> bool:
    text = path.read_text("utf-8", "replace") if path.exists() else ""
    return above(text) != text


def roll_back(location: Path) -> bool:
    """Take back what an interrupted bake, or an interrupted undo, has left; whether there was any."""
    opened = location / OPEN
    found = opened.exists()
    with _disk(location, "TransformerEngine may be half changed: mend that, and start this again"):
        if (opened / MANIFEST).exists():
            _exchange(opened, ORIGINAL)
        if found:
            shutil.rmtree(opened)
    return found


def _gather(decision: Decision, opened: Path) -> None:
    """Fill the folder `OPEN`: the corrected modules with their bytecode, and links to, or copies of, what they replace.

    The guard that closes TE is there twice: once for the bake, once to take it back.
    """
    root, new = Path(decision.source.location).parent, opened / RESULT
    paths = _write_modules(decision, new)
    if not (new / INIT).exists():  # it makes way for the guard
        _link_or_copy(root / INIT, new / INIT)
    for path in sorted({INIT, *paths}):
        py_compile.compile(str(new / path), dfile=str(root / path), doraise=True)
        for old in (root / path, *_bytecode(root / path)):
            if old.exists():
                _link_or_copy(old, opened / ORIGINAL / old.relative_to(root))
    for side in (ORIGINAL, RESULT):
        _write(opened / side / GUARD, _CLOSED, root / INIT)
    _write_manifest(decision, paths, new)
    os.rename(new / MANIFEST, opened / MANIFEST)


def _exchange(opened: Path, which: str) -> None:
    """Put the files of one side in place, as far as they are not there yet: first the guard, and last what opens TE."""
    root, side, files = opened.parent.parent, opened / which, _read(opened)["files"]
    if (side / GUARD).exists():
        for path in (INIT, *(each["path"] for each in files)):
            _delete(*_bytecode(root / path))
        os.replace(side / GUARD, (root / INIT).resolve())
    for each in files:
        module = root / each["path"]
        if each[which] is None and _sha256_of(module) in (None, each[RESULT]):
            _delete(*_bytecode(module), module)
    opens = [side / INIT, *_bytecode(side / INIT)]
    for staged in sorted(side.rglob("*.py*"), key=lambda path: path in opens):
        place = root / staged.relative_to(side)
        place.parent.mkdir(exist_ok=True)
        os.replace(staged, place.resolve())


def _delete(*files: Path) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def _bytecode(module: Path) -> list[Path]:
    """The compiled files of a module, of any interpreter."""
    return sorted(module.parent.glob(f"__pycache__/{module.stem}.*.pyc"))


def _link_or_copy(path: Path, place: Path) -> None:
    """Another link to a file, or a copy where that cannot be."""
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path.resolve(), place)
    except OSError:
        _write(place, path.read_bytes(), path)
        shutil.copystat(path, place)


def _write(path: Path, data: bytes, like: Path) -> None:
    """A new file with the permissions and the owner of another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    shutil.copymode(like, path)
    with contextlib.suppress(PermissionError):  # only root gives files away
        os.chown(path, like.stat().st_uid, like.stat().st_gid)


def _write_modules(decision: Decision, folder: Path) -> list[str]:
    """Write the corrected modules into a folder; returns their paths."""
    root, files = Path(decision.source.location).parent, corrected(decision)
    for file in files:
        like = root / (file.path if file.before else INIT)
        _write(folder / file.path, file.after.encode(), like)
    return [file.path for file in files]


def _write_manifest(decision: Decision, paths: list[str], folder: Path) -> dict[str, Any]:
    """Write down in a folder with corrected modules what they are: the versions, and the fixes with their verdicts.

    The ``files`` have the SHA-256 before and after (None: there is none), ``unchanged`` that of the modules that were
    read and are right as they are.
    """
    source = decision.source
    root = Path(source.location).parent
    read = {module_path(source, name) for name in source.read}
    manifest = {
        "te_graph_fixes_version": __version__,
        "te_version": source.version,
        "te_location": source.location,
        "fixes": {fix_id: verdict.verdict for fix_id, verdict in decision.decisions.items()},
        "files": [
            {"path": path, ORIGINAL: _sha256_of(root / path), RESULT: _sha256_of(folder / path)} for path in paths
        ],
        "unchanged": {path: _sha256_of(root / path) for path in sorted(read.difference(paths))},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def _read(folder: Path) -> Any:
    return json.loads((folder / MANIFEST).read_bytes())


def _sha256_of(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


@contextlib.contextmanager
def _disk(folder: Path, advice: str) -> Iterator[None]:
    """Turn an error of the disk into one that says what to do."""
    try:
        yield
    except OSError as error:
        raise BakeError(f"cannot change {error.filename or folder}: {error.strerror}. {advice}") from error


def overlay(decision: Decision, folder: Path) -> dict[str, Any]:
    """Lay the corrected modules into a folder, which is new, empty or an older overlay; returns its manifest."""
    part = folder.with_name(f"{folder.name}.te-graph-fixes-part")
    if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
        raise BakeError(f"{folder} is not empty, and no overlay of te-graph-fixes: name another folder")
    with _disk(folder, "Nothing was changed: name another folder"):
        shutil.rmtree(part, ignore_errors=True)
        manifest = _write_manifest(decision, _write_modules(decision, part), part)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(part, folder)
    return manifest


def require_mounted(source: Source, folder: Path) -> None:
    """Raise `BakeError` unless TE is the one that an overlay was made of, with the overlay's files in place."""
    try:
        manifest = _read(folder)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise BakeError(f"no overlay in {folder}: {MANIFEST}: {why}") from error
    root, files = Path(source.location).parent, manifest["files"]
    wanted = {each["path"]: each[RESULT] for each in files} | manifest["unchanged"]
    here = {path: _sha256_of(root / path) for path in wanted}
    unmounted = [each["path"] for each in files if here[each["path"]] == each[ORIGINAL]]
    others = [path for path, digest in here.items() if digest != wanted[path] and path not in unmounted]
    if others:
        raise BakeError(
            f"{', '.join(others)} in {root}: neither the overlay's nor what it was made of, which is TransformerEngine "
            f"{manifest['te_version']}: make the overlay again"
        )
    if unmounted:
        where = f"{len(unmounted)} of {len(files)} files are not mounted, first {root / unmounted[0]}"
        raise BakeError(f"{where}: mount what `te-graph-fixes bake --overlay` printed")


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
