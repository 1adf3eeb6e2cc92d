"""The manifest of a baked TransformerEngine (TE): a file in its folder with the fixes, and a digest of each file.

Bakes, overlays and the patches of ``te-graph-fixes diff`` contain a manifest. As long as every listed module matches
its digest, the manifest is trusted, and TE's source is not searched.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .patching import TE
from .patching.source import Source, TENotFoundError
from .status import Status
from .version import __version__

NAME = "te-graph-fixes.json"
BAKE, UNDO = "te-graph-fixes bake", "te-graph-fixes bake --undo"
BEFORE, AFTER, CHANGED = "before", "after", "changed"
"""The states of a module: as it was before the bake, as the bake wrote it, or neither."""


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_digest(path: str | Path) -> str | None:
    """Return the digest of a file, following links; None if there is nothing, and "" if it cannot be read."""
    with contextlib.suppress(OSError):
        if os.path.isfile(path):
            return digest(Path(path).read_bytes())
    return "" if os.path.lexists(path) else None


class ManifestError(Exception):
    """A manifest is invalid, or the files of a baked TE do not match it."""


@dataclass(frozen=True)
class Manifest:
    """The fixes that te-graph-fixes ``version`` wrote into the files of a TE.

    ``fixes`` maps each id to a status: ``applied``, ``disabled`` by the user, or the verdict ``not-needed`` or
    ``not-applicable``. ``files`` maps the path of each module to its digests before the bake (None: the bake added the
    module) and after it. The paths are relative to the folder that contains TE. ``places`` and ``code``
    describe the changed functions, to compare them with the loaded functions (`patching.files.changed_code`).
    """

    version: str
    te_version: str | None
    fixes: dict[str, str]
    files: dict[str, tuple[str | None, str]]
    places: dict[str, list[str]]
    code: dict[str, str]

    @classmethod
    def read(cls, location: Path) -> Manifest | None:
        """Return the manifest of the TE in a folder, or None if there is none. Keys of a newer version are ignored.

        Raise `ManifestError` if the manifest is invalid, for example if it names a file outside TE.
        """
        file = location / NAME
        if not os.path.lexists(file):
            return None
        try:
            data = json.loads(file.read_bytes() if file.is_file() else b"")
            manifest = cls(**{field.name: data[field.name] for field in fields(cls)})
            texts = [manifest.version, manifest.te_version or "", *manifest.fixes.values()]
            is_valid = all(isinstance(text, str) for text in texts)
            is_valid &= any(before for before, _ in manifest.files.values())  # a bake changes at least one module
            for path, (before, after) in manifest.files.items():
                is_valid &= re.fullmatch(rf"{TE}(/\w+)+\.py", path, re.ASCII) is not None  # inside TE
                is_valid &= before != after
                is_valid &= all(re.fullmatch("[0-9a-f]{64}", text) is not None for text in (before or after, after))
            places = itertools.chain.from_iterable(manifest.places.values())
            is_valid &= all(re.fullmatch(rf"{TE}(\.\w+)+(:[\w.<>]+)?", place, re.ASCII) for place in places)
            is_valid &= all(isinstance(text, str) for text in manifest.code.values())
            if is_valid:
                return manifest
            problem = "wrong content"
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}"
        advice = "Revert the change of this file, or delete it and reinstall TransformerEngine"
        raise ManifestError(f"{file} is not a valid manifest ({problem}). {advice}")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @property
    def applied(self) -> list[str]:
        return [fix_id for fix_id, status in self.fixes.items() if status == Status.APPLIED]

    @property
    def disabled(self) -> list[str]:
        return [fix_id for fix_id, status in self.fixes.items() if status == Status.DISABLED]

    @property
    def by(self) -> str:
        return f"te-graph-fixes {self.version}"

    @property
    def outdated(self) -> str:
        """A message with the remedy if another version of this package baked the fixes, else ""."""
        if self.version == __version__:
            return ""
        return f"{self.by} baked this TransformerEngine, but this is te-graph-fixes {__version__}. Run:\n  {BAKE}"

    def states(self, root: Path) -> dict[str, str]:
        """Return the state of each module: `BEFORE`, `AFTER` or `CHANGED`. ``root`` is the folder that contains TE."""
        states = {}
        for path, (before, after) in self.files.items():
            current = file_digest(root / path)
            states[path] = AFTER if current == after else BEFORE if current == before else CHANGED
        return states

    def is_overwritten(self, te_version: str | None, states: Mapping[str, str]) -> bool:
        """Return whether another version of TE was installed over the bake, so that no edited module remains."""
        edited = {states[path] for path, (before, _) in self.files.items() if before}
        return te_version != self.te_version and AFTER not in edited


def read_manifest(source: Source) -> Manifest | None:
    """Read the manifest of a TE; None if there is none. Raise `ManifestError` unless the bake is intact."""
    location = Path(source.location)
    manifest = Manifest.read(location)
    states = manifest.states(location.parent) if manifest else {}
    if manifest is None or set(states.values()) == {AFTER}:
        return manifest
    changed = [path for path, state in states.items() if state == CHANGED]
    if manifest.is_overwritten(source.version, states):
        problem = f"TransformerEngine was reinstalled after {manifest.by} baked it, and old files remain"
        advice = f"Replace them with `{BAKE}`, or delete them with `{UNDO}`"
    elif changed:
        problem = f"modules changed after {manifest.by} baked them: {', '.join(changed)}"
        advice = f"Revert the change, or discard it with `{UNDO} --force`"
    else:
        done = list(states.values()).count(AFTER)
        problem = f"a bake or its undo was interrupted, or is running: {done} of {len(states)} modules are baked"
        advice = f"If none is running, run `{BAKE}` or `{UNDO}`"
    raise ManifestError(f"{problem}. {advice}")


def installed_manifest() -> Manifest | None:
    """Read the manifest of the installed TE; None without TE or manifest, or if files have changed since the bake."""
    with contextlib.suppress(TENotFoundError, ManifestError):
        return read_manifest(Source.installed())
    return None
