"""The file in TransformerEngine's (TE's) folder that says what this package has changed there.

`te_graph_fixes.commands.bake`, the patches of ``te-graph-fixes diff`` and overlays write it. While every module that it
names is as it was written, it is believed and no shape is looked at.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from .patching.source import TE, Source, TENotFoundError
from .settings import COMMAND
from .version import __version__

NAME = "te-graph-fixes.json"
MADE, LEFT_OUT = "made", "left out"
OPEN = ".te-graph-fixes.open"
"""The folder in TE's that stands while `te_graph_fixes.commands.bake` changes files, or changes them back."""


@functools.cache
def own_text() -> str:
    """A digest of the fixes that this package has, and of the modules that it ships."""
    here = Path(__file__).parent
    sources = sorted([*here.glob("fixes/*.py"), *here.glob("shipped/*.py")])
    return digest(b"".join(path.read_bytes() for path in sources))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Stamp:
    """What te-graph-fixes of a ``version``, with the fixes of which ``text`` is the digest, has made of a TE.

    ``fixes`` has a word for each: `MADE`, `LEFT_OUT` by the user, or the negative verdict at that time. ``files`` has
    the digests of each module before (None: it was added) and after, by its path from the folder that holds TE.
    """

    version: str
    text: str
    te_version: str | None
    fixes: Mapping[str, str]
    files: Mapping[str, tuple[str | None, str]]

    @classmethod
    def read(cls, folder: Path) -> Stamp:
        stamp = cls(**json.loads((folder / NAME).read_bytes()))
        if not (isinstance(stamp.fixes, dict) and isinstance(stamp.files, dict)):
            raise ValueError("its fixes and files are no objects")
        return stamp

    @property
    def edited(self) -> list[str]:
        return [path for path, (before, _) in self.files.items() if before]

    @property
    def added(self) -> list[str]:
        """The files that TE did not have, the stamp included."""
        return [*(path for path, (before, _) in self.files.items() if not before), f"{TE}/{NAME}"]

    @property
    def made(self) -> list[str]:
        return [fix_id for fix_id, word in self.fixes.items() if word == MADE]

    @property
    def is_outdated(self) -> bool:
        """Whether other fixes than those of this package were put on disk, by no later release."""
        theirs, ours = (Version(Version(version).public) for version in (self.version, __version__))  # without commits
        return self.text != own_text() and theirs <= ours

    @property
    def by(self) -> str:
        """Who made it, in words."""
        is_other = self.text != own_text() and self.version == __version__
        return f"{'another build of ' if is_other else ''}te-graph-fixes {self.version}"


class ChangedStampError(Exception):
    """A TE that this package has corrected on disk is no longer as it was written.

    ``leftover`` is the stamp where TE was installed anew since: of the bake only the modules that it added are left.
    """

    leftover: Stamp | None = None


def of_source(source: Source) -> Stamp | None:
    """The stamp of a TE; None where this package has changed nothing on disk.

    Raises `ChangedStampError` unless each module that the stamp names is as it was written.
    """
    location, undo = Path(source.location), f"`{COMMAND} bake --undo{option(source)}`"
    if (location / OPEN).exists():
        raise ChangedStampError(f"start {undo} or `bake`: one of them was interrupted")
    try:
        stamp = Stamp.read(location)
    except OSError:
        return None
    except (ValueError, TypeError) as error:
        raise ChangedStampError(f"take the edit of {location / NAME} back: it cannot be read ({error})") from error
    files = {path: location.parent / path for path in stamp.files}
    here = {path: digest(file.read_bytes()) if file.exists() else None for path, file in files.items()}
    changed = [path for path, (_, after) in stamp.files.items() if here[path] != after]
    if not changed:
        return stamp
    if stamp.te_version != source.version or all(here[path] in (stamp.files[path][0], None) for path in stamp.edited):
        replaced = ChangedStampError(
            f"delete with {undo} what {stamp.by} has left: the TransformerEngine that it corrected on disk "
            "was replaced since"
        )
        replaced.leftover = stamp
        raise replaced
    raise ChangedStampError(
        f"take the edit back, or install TransformerEngine anew and {undo}: {', '.join(changed)} is not as "
        f"{stamp.by} has written it"
    )


def installed() -> Stamp | None:
    """That of the TE that would be imported; None where there is no TE, or it was changed since."""
    with contextlib.suppress(TENotFoundError, ChangedStampError):
        return of_source(Source.installed())
    return None


def option(source: Source) -> str:
    """What to add to a command for this TE, with a space before it; "" for the installed one."""
    with contextlib.suppress(TENotFoundError):
        if Source.installed().location == source.location:
            return ""
    return f" --source {shlex.quote(str(Path(source.location).parent))}"
