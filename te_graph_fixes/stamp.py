"""The file in TransformerEngine's (TE's) folder that says what this package has changed there.

`te_graph_fixes.commands.bake`, the patches of ``te-graph-fixes diff`` and overlays write it. While every module that it
names is as it was written, it is believed, and nobody looks at the source of a module.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from .patching.source import Source, TENotFoundError
from .settings import COMMAND, option
from .version import __version__, fixes_digest

NAME = "te-graph-fixes.json"
MADE, LEFT_OUT = "made", "left out"
KEPT, OPEN = ".te-graph-fixes", ".te-graph-fixes/open"
"""The folder in TE's that a bake works in, and where the stamp is while modules are changed, or changed back."""


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Stamp:
    """What te-graph-fixes of a ``version``, with the fixes of which ``text`` is the digest, has made of a TE.

    ``fixes`` has a word for each fix: `MADE`, `LEFT_OUT` by the user, or the state that it had, ``not-needed`` or
    ``not-applicable``. ``files`` has the digests of each module before (None: it was added) and after, by its path from
    the folder that holds TE.
    """

    version: str
    text: str
    te_version: str | None
    fixes: dict[str, str]
    files: dict[str, tuple[str | None, str]]

    @classmethod
    def read(cls, file: Path) -> Stamp:
        return cls(**json.loads(file.read_bytes()))

    @property
    def made(self) -> list[str]:
        return [fix_id for fix_id, word in self.fixes.items() if word == MADE]

    @property
    def is_outdated(self) -> bool:
        """Whether other fixes than those of this package were put on disk, by no later release."""
        return self.text != fixes_digest() and Version(self.version).release <= Version(__version__).release

    @property
    def by(self) -> str:
        return f"te-graph-fixes {self.version}"


class ChangedStampError(Exception):
    """A TE that this package has corrected on disk is no longer as it was written."""


class ReplacedError(ChangedStampError):
    """It was installed anew since: of the bake only the modules that it added are left."""


def of_source(source: Source) -> Stamp | None:
    """The stamp of a TE; None where this package has changed nothing on disk.

    Raises `ChangedStampError` unless each module that the stamp names is as it was written.
    """
    location = Path(source.location)
    if (location / OPEN).exists():
        undo = _undo_command(source)
        raise ChangedStampError(f"wait for `bake` or its `--undo`; if none runs, start {undo}: it was interrupted")
    if not (location / NAME).exists():
        return None
    try:
        stamp = Stamp.read(location / NAME)
    except (ValueError, TypeError) as error:
        raise ChangedStampError(f"take the edit of {location / NAME} back: it cannot be read ({error})") from error
    root = location.parent
    here = {path: digest((root / path).read_bytes()) for path in stamp.files if (root / path).exists()}
    changed = [path for path, (_, after) in stamp.files.items() if here.get(path) != after]
    if not changed:
        return stamp
    edited = {path: before for path, (before, _) in stamp.files.items() if before}
    is_original = all(here.get(path) in (before, None) for path, before in edited.items())
    is_another = stamp.te_version != source.version and edited.keys() <= set(changed)
    if is_original or is_another:
        raise ReplacedError(
            f"delete with {_undo_command(source)} what {stamp.by} has left: "
            "the TransformerEngine that it corrected was replaced since"
        )
    raise ChangedStampError(
        f"take the edit back; or, if TransformerEngine was installed anew, delete {NAME}, {KEPT} and pytorch/_te_*.py "
        f"in {location}. What has changed since {stamp.by} corrected it: {', '.join(changed)}"
    )


def installed() -> tuple[Source, Stamp] | None:
    """The TE that would be imported, with its stamp; None where there is no TE, no stamp, or it was changed since."""
    with contextlib.suppress(TENotFoundError, ChangedStampError):
        source = Source.installed()
        if stamp := of_source(source):
            return source, stamp
    return None


def is_baked(source: Source) -> bool:
    """Whether the fixes in a TE's files are from a bake, which keeps the originals, and not from a patch or overlay."""
    return (Path(source.location) / KEPT).exists()


def undoing(source: Source) -> str:
    """What to do to have a TE's files without the fixes that are in them."""
    if is_baked(source):
        return f"take the fixes out of TransformerEngine's files with {_undo_command(source)}"
    return "take the fixes out of TransformerEngine's files with `patch -p1 -R`, or leave out the overlay's mounts"


def _undo_command(source: Source) -> str:
    return f"`{COMMAND} bake --undo{option(source)}`"
