"""The manifest of a baked TransformerEngine (TE): a file in TE's folder that lists the fixes and the baked modules.

Bakes, overlays and the patches of ``te-graph-fixes diff`` contain a manifest. As long as every listed module matches
its listed digest, the manifest is trusted, and TE's source is not searched.
"""

import contextlib
import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from .patching import TE
from .patching.source import Source, TENotFoundError
from .version import __version__

NAME = "te-graph-fixes.json"
BAKE, UNDO = "te-graph-fixes bake", "te-graph-fixes bake --undo"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_digest(path: str | Path) -> str | None:
    """Return the digest of a file, following links, or None if the file does not exist or cannot be read."""
    try:
        return digest(Path(path).read_bytes())
    except OSError:
        return None


class BakeError(Exception):
    """The error if a manifest is invalid, if a baked TE does not match it, or if a bake, an undo or a diff fails."""


_TEXT, _DIGEST, _COMMA = r'"[^"\\\x7f]*"', '"[0-9a-f]{64}"', "(, )?"
_FORMAT = {
    "version": _TEXT,
    "te_version": f"{_TEXT}|null",
    "fixes": rf"{{({_TEXT}: {_TEXT}{_COMMA})*}}",
    "files": rf'(?=.*\["){{("{TE}(/\w+)+\.py": \[({_DIGEST}|null), {_DIGEST}\]{_COMMA})+}}',
    "functions": rf'{{({_TEXT}: \[("{TE}(\.\w+)+:[\w.<>]+"{_COMMA})*\]{_COMMA})*}}',
}
"""Regular expressions for the JSON of the fields. All files must be in TE, and at least one must predate the bake."""


@dataclass(frozen=True)
class Manifest:
    """The fixes that te-graph-fixes ``version`` wrote into the files of a TE.

    ``fixes`` maps each id to a status: ``applied``, ``disabled`` by the user, or the verdict ``not-needed`` or
    ``not-applicable``. ``files`` maps the path of each module to its digests before the bake (None: the bake added the
    module) and after it. The paths are relative to the folder that contains TE. ``functions`` names the functions that
    each fix changes (`patching.installation.Functions`).
    """

    version: str
    te_version: str | None
    fixes: dict[str, str]
    files: dict[str, tuple[str | None, str]]
    functions: dict[str, list[str]]

    @classmethod
    def read(cls, location: Path) -> "Manifest | None":
        """Return the manifest in ``location``, TE's folder, or None if there is no manifest. Ignore unknown keys.

        Raise `BakeError` if the manifest is invalid, for example if it names a file outside TE.
        """
        file = location / NAME
        try:
            data = json.loads(file.read_bytes())
            for name, form in _FORMAT.items():
                if not re.fullmatch(form, json.dumps(data[name]), re.ASCII):
                    raise ValueError(f"wrong content of {name!r}")
            return cls(**{name: data[name] for name in _FORMAT})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}"
        advice = "Revert the change of this file, or delete it and reinstall TransformerEngine"
        raise BakeError(f"{file} is not a valid manifest ({problem}). {advice}")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @property
    def by(self) -> str:
        return f"te-graph-fixes {self.version}"

    @property
    def outdated(self) -> str:
        """A message with the remedy if another version of this package baked the fixes, else ""."""
        if self.version == __version__:
            return ""
        return f"{self.by} baked this TransformerEngine, but this is te-graph-fixes {__version__}. Run:\n  {BAKE}"

    def baked(self, source: Source, force: bool = False) -> list[str]:
        """Return the paths of the modules that differ from their state before the bake, or [] if none does.

        If another TE was installed over the bake, only the modules that the bake added are returned. Raise `BakeError`
        if modules have changed since the bake, unless ``force`` is true.
        """
        found = {path: file_digest(Path(source.location).parent / path) for path in self.files}
        baked = [path for path in found if found[path] == self.files[path][1]]
        changed = [path for path in found if found[path] not in self.files[path]]
        if self.te_version != source.version and not any(self.files[path][0] for path in baked):
            return baked
        if changed and not force:
            problem = f"modules changed after {self.by} baked them: {', '.join(changed)}"
            raise BakeError(f"{problem}. Revert the change, or discard it with `{UNDO} --force`")
        return baked + changed


def read_manifest(source: Source) -> Manifest | None:
    """Return the manifest of a TE, or None if TE is not baked. Raise `BakeError` unless the bake is intact."""
    manifest = Manifest.read(Path(source.location))
    if manifest and len(baked := manifest.baked(source)) < len(manifest.files):
        problem = "a bake or its undo was interrupted or is running, or TransformerEngine was reinstalled"
        advice = f"If no bake is running, run `{BAKE}` or `{UNDO}`"
        raise BakeError(f"{problem}: {len(baked)} of {len(manifest.files)} modules are baked. {advice}")
    return manifest


def installed_manifest() -> Manifest | None:
    """Return the manifest of the installed TE, or None if there is no TE, no manifest or no intact bake."""
    with contextlib.suppress(TENotFoundError, BakeError):
        return read_manifest(Source.installed())
    return None
