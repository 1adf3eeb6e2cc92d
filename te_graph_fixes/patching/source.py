"""TransformerEngine (TE) as source text: find it, read it, parse it.

Nothing here imports torch or TE. The same classes serve an installed TE and a source tree.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib.machinery
import importlib.metadata
import importlib.util
import io
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, cast

from .definition import Definition, UnrecognizedError, unrecognized
from .matching import extent

TE = "transformer_engine"
_DISTRIBUTIONS = (
    *(TE, "transformer-engine-cu13", "transformer-engine-cu12", "transformer_engine_torch"),
    *("transformer_engine_rocm7", "transformer_engine_rocm_torch"),
)


class TENotFoundError(Exception):
    """There is no TransformerEngine where it was looked for."""


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Put off the collection of garbage, which is slow next to torch's objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Edit(NamedTuple):
    """Replace the characters ``start`` to ``end`` of ``module``'s source by ``text``."""

    module: str
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Source:
    """One TE: its package folder (or zip entry) and the version that its metadata names."""

    location: str
    version: str | None
    _modules: dict[str, ModuleSource | None] = field(default_factory=dict, init=False, compare=False)

    @classmethod
    def installed(cls) -> Source:
        """The TE that ``import transformer_engine`` would find; raises `TENotFoundError`."""
        with contextlib.suppress(ImportError, ValueError):  # ValueError: a stand-in without __spec__ in sys.modules
            spec = importlib.util.find_spec(TE)
            for location in (spec and spec.origin and spec.submodule_search_locations) or ():
                return cls(location, _version(os.path.dirname(location)))
        found = f"in sys.modules is a stand-in ({type(sys.modules.get(TE)).__name__}) without files"
        raise TENotFoundError(f"{TE} {found if TE in sys.modules else f'is not installed in {sys.executable}'}")

    @classmethod
    def at(cls, folder: str | Path) -> Source:
        """The TE in ``folder``: a site-packages folder, a checkout, or the package folder itself."""
        root = Path(os.path.abspath(folder))
        for package in (root, root / TE) if str(folder) else ():
            if package.name == TE and (package / "__init__.py").is_file():
                return cls(str(package), _version(str(package.parent)))
        raise TENotFoundError(f"no {TE} package in {str(folder)!r}: expected {root / TE}/__init__.py")

    def find(self, name: str) -> ModuleSource | None:
        """The source of module ``name``, or None where this TE has no such module."""
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def module(self, name: str) -> ModuleSource:
        """The source of module ``name``; raises `UnrecognizedError` where there is none."""
        if (module := self.find(name)) is None:
            raise unrecognized(f"module {name}", self.location)
        return module

    @property
    def modules_read(self) -> list[str]:
        """The names of the modules that were looked at."""
        return sorted(name for name, module in self._modules.items() if module)

    def without_trees(self) -> Source:
        """The same texts without their syntax trees, which are large."""
        source = Source(self.location, self.version)
        source._modules.update((name, module and replace(module)) for name, module in self._modules.items())
        return source

    def _read(self, name: str) -> ModuleSource | None:
        parent = os.path.join(self.location, *name.split(".")[1:-1])
        spec = importlib.machinery.PathFinder.find_spec(name, [parent])
        if spec is None or spec.loader is None:
            return None
        path = spec.origin or name
        if not path.endswith(".py"):
            raise UnrecognizedError(f"{name} in {self.location} has no source text ({path})")
        try:
            data = cast(importlib.machinery.SourceFileLoader, spec.loader).get_data(path)
            text = importlib.util.decode_source(data)
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise UnrecognizedError(f"cannot read the source of {name} in {self.location}: {error}") from error
        return ModuleSource(name, path, text, "\r\n" if b"\r\n" in data else "\n")


def _version(folder: str) -> str | None:
    """The version of the TE in ``folder`` by the metadata beside it, or by the VERSION.txt of a checkout."""
    for name in _DISTRIBUTIONS:
        for distribution in importlib.metadata.distributions(name=name, path=[folder]):
            with contextlib.suppress(Exception):  # METADATA is unreadable, not UTF-8, without a version
                if distribution.version:
                    return distribution.version
    with contextlib.suppress(OSError):
        return Path(folder, "build_tools", "VERSION.txt").read_text("utf-8", "replace").strip()
    return None


@dataclass(frozen=True)
class ModuleSource:
    """The text of one module, as Python reads it, and the functions and classes in it.

    ``newline`` is the line break of the file.
    """

    name: str
    path: str
    text: str
    newline: str = "\n"
    _asked_for: dict[str, Definition] = field(default_factory=dict, init=False, compare=False)

    @cached_property
    def tree(self) -> ast.Module:
        try:
            return ast.parse(self.text, self.path)
        except (SyntaxError, ValueError) as error:  # ValueError: Python 3.10 for null bytes
            raise UnrecognizedError(f"cannot parse {self.path}: {error}") from error

    @cached_property
    def starts(self) -> list[int]:
        """The character offset at which each line starts, by its number, and last that of the text's end."""
        return [0, 0, *accumulate(map(len, io.StringIO(self.text)))]

    def line_number(self, offset: int) -> int:
        """The line of a character offset."""
        return self.text.count("\n", 0, offset) + 1

    def line(self, number: int) -> str:
        """A line, with its line break, as Python counts them."""
        return self.text[self.starts[number] : self.starts[number + 1]]

    @cached_property
    def definitions(self) -> dict[str, ast.FunctionDef | ast.ClassDef]:
        """Every class and function at module or class level, by qualified name; ambiguous names are left out."""
        by_name = defaultdict[str, list[ast.FunctionDef | ast.ClassDef]](list)
        pending = [("", self.tree.body)]
        for prefix, body in pending:
            for node in body:
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    by_name[prefix + node.name].append(node)
                    pending += [(f"{prefix}{node.name}.", node.body)] if isinstance(node, ast.ClassDef) else []
        return {name: nodes[0] for name, nodes in by_name.items() if len(nodes) == 1}

    def definition(self, qualname: str) -> Definition:
        """The function or class ``qualname``; raises `UnrecognizedError` where there is none or more than one."""
        if qualname not in self._asked_for:
            if qualname not in self.definitions:
                raise unrecognized(f"one definition of {qualname}", self.path, "none or several")
            self._asked_for[qualname] = Definition(self, qualname, self.definitions[qualname])
        return self._asked_for[qualname]

    def span(self, node: Any) -> tuple[int, int]:
        """The character offsets at which ``node`` starts and ends; syntax trees count columns in UTF-8 bytes."""
        (first, column), (last, end_column) = extent(node)
        start, end = self.line(first).encode()[:column], self.line(last).encode()[:end_column]
        return self.starts[first] + len(start.decode()), self.starts[last] + len(end.decode())


def first_line(node: Any) -> int:
    """The first line of a statement, decorators included."""
    decorators = getattr(node, "decorator_list", None)
    return int(min(decorators[0].lineno, node.lineno) if decorators else node.lineno)
