"""The manifest of a baked TransformerEngine (TE): a file in its folder with the fixes, and a digest of each file.

Bakes, overlays and the patches of ``te-graph-fixes diff`` contain a manifest. As long as every listed module matches
its digest, the manifest is trusted, and TE's source is not searched.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .patching.source import Source, TENotFoundError
from .status import Status

NAME = "te-graph-fixes.json"
BAKE_FOLDER, OPEN = ".te-graph-fixes", ".te-graph-fixes/open"
"""The folder of a bake inside TE's folder, and the place of the manifest while modules are being exchanged."""
UNDO = "te-graph-fixes bake --undo"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Manifest:
    """The fixes that te-graph-fixes ``version`` wrote into the files of a TE.

    ``fixes`` maps each id to a status: ``applied``, ``disabled`` by the user, or the verdict ``not-needed`` or
    ``not-applicable``. ``files`` maps the path of each module to its digests before the bake (None: the bake added the
    module) and after it. The paths are relative to the folder that contains TE.
    """

    version: str
    te_version: str | None
    fixes: dict[str, str]
    files: dict[str, tuple[str | None, str]]

    @classmethod
    def read(cls, file: Path) -> Manifest:
        """Return the manifest in a text. Keys that a newer version added are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in json.loads(file.read_bytes()).items() if key in known})

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


class ManifestError(Exception):
    """The files of a baked TE no longer match its manifest."""


class ReinstalledError(ManifestError):
    """TE was reinstalled after the bake. Only the modules that the bake added remain."""


def read_manifest(source: Source) -> Manifest | None:
    """Read the manifest of a TE; None if nothing is baked into it.

    Raise `ManifestError` if a listed module does not match its digest.
    """
    location = Path(source.location)
    if (location / OPEN).exists():
        raise ManifestError(f"a bake or its undo is running, or was interrupted. If none is running, run `{UNDO}`")
    if not (location / NAME).exists():
        return None
    try:
        manifest = Manifest.read(location / NAME)
    except (ValueError, TypeError, AttributeError) as error:
        raise ManifestError(f"{location / NAME} cannot be read ({error}). Revert the change of this file") from error
    root = location.parent
    current = {path: digest((root / path).read_bytes()) for path in manifest.files if (root / path).exists()}
    changed = [path for path, (_, after) in manifest.files.items() if current.get(path) != after]
    if not changed:
        return manifest
    edited = {path: before for path, (before, _) in manifest.files.items() if before}
    is_original = all(current.get(path) in (before, None) for path, before in edited.items())
    is_another_version = manifest.te_version != source.version and edited.keys() <= set(changed)
    if is_original or is_another_version:
        raise ReinstalledError(
            f"TransformerEngine was reinstalled after {manifest.by} baked it, and old files remain. "
            f"Delete them with `{UNDO}`"
        )
    raise ManifestError(
        f"modules changed after {manifest.by} baked them: {', '.join(changed)}. Revert the change; if "
        f"TransformerEngine was reinstalled, delete {NAME}, {BAKE_FOLDER} and pytorch/_te_*.py in {location} instead"
    )


def installed_manifest() -> Manifest | None:
    """Read the manifest of the installed TE; None without TE or manifest, or if files have changed since the bake."""
    with contextlib.suppress(TENotFoundError, ManifestError):
        return read_manifest(Source.installed())
    return None
