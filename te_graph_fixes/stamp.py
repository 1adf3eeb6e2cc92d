"""The comment that ends each module which this package has changed on disk, and what it says of the tree later.

All stamps of one TransformerEngine (TE) say the same, but for the line ``here``, and each ends in the digest of all
that is above it. While every module that they name is as it was written, they are believed and no shape is looked at.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

PACKAGE = "transformer_engine.pytorch"
MADE, MODULES = "made", "modules"
OPEN = ".te-graph-fixes.open"
"""The folder in TE's that stands while `te_graph_fixes.commands.bake` changes files, or changes them back."""
_BEGIN = "# Corrected on disk by te-graph-fixes "
_ADVICE = "take the edit back, or install TransformerEngine anew and `te-graph-fixes bake --undo`"
_DIGEST = "# sha256 of all above: "
_STAMP = re.compile(rf"^{_BEGIN}(?P<version>\S+)\n(?P<facts>(?:#  ? ?\S.*\n)+){_DIGEST}(?P<digest>\w+)\n", re.MULTILINE)


@dataclass(frozen=True)
class Stamp:
    """What te-graph-fixes of a ``version`` has made of a TE.

    ``facts`` are names by word: the fixes `MADE`, those under each other verdict at that time, and the `MODULES` that
    were changed or added, without `PACKAGE`.
    """

    version: str
    facts: Mapping[str, tuple[str, ...]]

    @property
    def verdicts(self) -> dict[str, str]:
        """The word for each fix."""
        return {fix: word for word, names in self.facts.items() if word != MODULES for fix in names}

    def below(self, text: str, here: tuple[str, ...]) -> str:
        """The text of a module with this stamp; ``here`` are the fixes that changed it."""
        text += "" if text.endswith("\n") else "\n"
        text += f"{_BEGIN}{self.version}\n"
        for word, names in {"here": here, **self.facts}.items():
            if names:
                line = f"# {word}: {', '.join(names)}"
                text += textwrap.fill(line, 116, subsequent_indent="#   ", break_on_hyphens=False) + "\n"
        return f"{text}{_DIGEST}{_digest(text + _DIGEST)}\n"


class ChangedStampError(Exception):
    """A TE that this package has corrected on disk is no longer as it was written."""


def above(text: str) -> str:
    """The text of a module without its stamp."""
    found = _STAMP.search(text)
    return text[: found.start()] if found else text


def of_text(text: str) -> Stamp | None:
    """The stamp that ends a text; None where it has none, or is not as it was written."""
    found = _STAMP.search(text)
    if found is None or found.end() != len(text) or _digest(text[: found.start("digest")]) != found["digest"]:
        return None
    lines = found["facts"].replace("\n#   ", " ").splitlines()
    facts = dict(line.removeprefix("# ").split(": ", 1) for line in lines)
    return Stamp(found["version"], {word: tuple(names.split(", ")) for word, names in facts.items() if word != "here"})


def of_tree(location: str) -> Stamp | None:
    """The stamp of the TE in the package folder ``location``; None where this package has changed nothing in it.

    Raises `ChangedStampError` unless each module that the stamps name has one, and all are as they were written.
    """
    if os.path.exists(os.path.join(location, OPEN)):
        raise ChangedStampError(
            "a bake or its undo was interrupted: start `te-graph-fixes bake` again, or `bake --undo`"
        )
    stamps = {name: of_text(text) for name, text in _marked(location)}
    if not stamps:
        return None
    first = next(filter(None, stamps.values()), None)
    for name in sorted(stamps.keys() | set(first.facts[MODULES] if first else ())):
        if first is None or stamps.get(name) != first:
            file = f"pytorch/{name.replace('.', '/')}.py"
            raise ChangedStampError(f"{file} is not as te-graph-fixes has written it: {_ADVICE}")
    return first


def _marked(location: str) -> Iterator[tuple[str, str]]:
    """The modules that hold the first line of a stamp: name below `PACKAGE`, and text."""
    root = os.path.join(location, "pytorch")
    for folder, _, names in os.walk(root):
        for path in (os.path.join(folder, name) for name in names if name.endswith(".py")):
            with contextlib.suppress(OSError), open(path, "rb") as file:
                data = file.read()
                if _BEGIN.encode() in data:
                    module = os.path.relpath(path, root).removesuffix(".py").replace(os.sep, ".")
                    yield module.removesuffix(".__init__"), importlib.util.decode_source(data)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
