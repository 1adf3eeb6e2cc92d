"""Find, read and parse the source of a TransformerEngine (TE), and search it for patterns.

This module imports neither torch nor TE. The same classes serve an installed TE and a source tree.
"""

import ast
import contextlib
import importlib.metadata
import importlib.util
import io
import os
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from . import TE
from .matching import Match, Pattern


class TENotFoundError(Exception):
    """The error if no TransformerEngine is found."""


class UnrecognizedError(Exception):
    """The error if a fix does not find its code exactly as expected. The fix must then not change this source."""


def unrecognized(wanted: str, where: object, found: str = "none") -> UnrecognizedError:
    """Return the error for code that differs from the ``wanted`` code. ``where`` is a `Definition` or a path."""
    return UnrecognizedError(f"looked for {wanted} in {where}, found {found}")


class Edit(NamedTuple):
    """A replacement of the characters ``start`` to ``end`` in the source of ``module`` with ``text``."""

    module: str
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Source:
    """The source of one TE: its package folder, and its version, or None if the version is unknown.

    ``_modules`` are the modules read so far (None: there is no such module). All others are read from the folder.
    """

    location: str
    version: str | None
    _modules: "dict[str, ModuleSource | None]" = field(default_factory=dict, compare=False)

    @classmethod
    def installed(cls) -> "Source":
        """Return the TE that ``import transformer_engine`` finds. Raise `TENotFoundError` if there is none."""
        with contextlib.suppress(ImportError, ValueError):  # ValueError: a module without __spec__ in sys.modules
            spec = importlib.util.find_spec(TE)
            if spec and spec.origin and spec.submodule_search_locations:
                location = spec.submodule_search_locations[0]
                return cls(location, _version(os.path.dirname(location)))
        if TE in sys.modules:
            raise TENotFoundError(f"{TE} in sys.modules is a stand-in without files")
        raise TENotFoundError(f"{TE} is not installed in {sys.executable}")

    @classmethod
    def at(cls, folder: str | Path) -> "Source":
        """Return the TE in ``folder``: a site-packages folder, a checkout, or the package folder of TE.

        Raise `TENotFoundError` if the folder contains no TE.
        """
        root = Path(os.path.abspath(folder))
        for package in (root, root / TE) if str(folder) else ():
            if package.name == TE and (package / "__init__.py").is_file():
                return cls(str(package), _version(str(package.parent)))
        raise TENotFoundError(f"no {TE} package in {str(folder)!r}: expected {root / TE}/__init__.py")

    def find(self, name: str) -> "ModuleSource | None":
        """Return module ``name``, or None if this TE has no such module."""
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def module(self, name: str) -> "ModuleSource":
        """Return module ``name``. Raise `UnrecognizedError` if this TE has no such module."""
        if (module := self.find(name)) is None:
            raise unrecognized(f"module {name}", self.location)
        return module

    @property
    def modules_read(self) -> list[str]:
        """The names of the modules that were read so far."""
        return sorted(name for name, module in self._modules.items() if module)

    def forget_modules(self) -> None:
        """Forget the modules read so far, because their syntax trees slow down every later garbage collection."""
        self._modules.clear()

    def _read(self, name: str) -> "ModuleSource | None":
        path = Path(self.location, *name.split(".")[1:]).with_suffix(".py")
        return ModuleSource.decoded(name, path, path.read_bytes()) if path.is_file() else None


def _version(folder: str) -> str | None:
    """Return TE's version from the metadata next to it, or from a checkout's VERSION.txt, or None if neither has it."""
    for metadata in sorted(Path(folder).glob(f"{TE}*-info")):  # TE's own metadata comes first
        with contextlib.suppress(Exception):  # METADATA is unreadable, is not UTF-8, or has no version
            if version := importlib.metadata.Distribution.at(metadata).version:
                return version
    with contextlib.suppress(OSError):
        return Path(folder, "build_tools", "VERSION.txt").read_text("utf-8", "replace").strip()
    return None


@dataclass(frozen=True)
class ModuleSource:
    """The source text of one module, as decoded by Python, with its functions and classes."""

    name: str
    path: str
    text: str
    _found: "dict[str, Definition]" = field(default_factory=dict, init=False, compare=False)

    @classmethod
    def decoded(cls, name: str, path: Path, data: bytes) -> "ModuleSource":
        """Return the module whose file at ``path`` contains ``data``, or would contain it."""
        return cls(name, str(path), importlib.util.decode_source(data))

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def starts(self) -> list[int]:
        """The character offset of each line's start, by line number. The last offset is the end of the text."""
        return [0, 0, *accumulate(map(len, io.StringIO(self.text)))]

    def place(self, offset: int) -> str:
        """Return the path and the line of a character offset, as in ``path:12``."""
        number = self.text.count("\n", 0, offset) + 1
        return f"{self.path}:{number}"

    def line(self, number: int) -> str:
        """Return a line with its line break. Numbers start at 1."""
        return self.text[self.starts[number] : self.starts[number + 1]]

    @cached_property
    def definitions(self) -> dict[str, ast.FunctionDef | ast.ClassDef]:
        """The classes and functions at module or class level by qualified name, except names that are defined twice."""
        by_name = defaultdict[str, list[ast.FunctionDef | ast.ClassDef]](list)
        pending = [("", self.tree.body)]
        for prefix, body in pending:
            for node in body:
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    by_name[prefix + node.name].append(node)
                    pending += [(f"{prefix}{node.name}.", node.body)] if isinstance(node, ast.ClassDef) else []
        return {name: nodes[0] for name, nodes in by_name.items() if len(nodes) == 1}

    def definition(self, place: str) -> "Definition":
        """Return the function or class at ``place``. Raise `UnrecognizedError` unless there is exactly one.

        In ``function.Class.method``, ``Class`` may be anywhere inside ``function``.
        """
        if place not in self._found:
            outer, _, name = place.rpartition(".")
            nodes = self.definition(outer).named(name) if outer else [self.definitions.get(name)]
            if len(nodes) != 1 or nodes[0] is None:
                raise unrecognized(f"one definition of {place}", self.path, "none or several")
            self._found[place] = Definition(self, place, nodes[0])
        return self._found[place]

    def span(self, node: Any) -> tuple[int, int]:
        """Return the character offsets of a node's start and end. An item of a `with` has no position of its own."""
        first, last = getattr(node, "context_expr", node), getattr(node, "optional_vars", None)
        last = last or first
        return self._offset(first.lineno, first.col_offset), self._offset(last.end_lineno, last.end_col_offset)

    def _offset(self, number: int, column: int) -> int:
        """Return the character offset of a line and column of a syntax tree, which counts columns in UTF-8 bytes."""
        return self.starts[number] + len(self.line(number).encode()[:column].decode())


@dataclass(frozen=True)
class Definition:
    """One function or class, with methods that search it for patterns."""

    module: ModuleSource
    qualname: str
    node: ast.FunctionDef | ast.ClassDef

    def __str__(self) -> str:
        return f"{self.qualname} ({self.module.path}:{self.node.lineno})"

    @cached_property
    def _by_type(self) -> dict[type, list[tuple[list[Any], int]]]:
        """All nodes in the definition, by type. Each entry is a list of siblings and the node's index in it."""
        nodes = defaultdict[type, list[tuple[list[Any], int]]](list)
        pending: list[tuple[list[Any], int]] = [([self.node], 0)]
        for siblings, number in pending:
            node = siblings[number]
            nodes[type(node)].append((siblings, number))
            for _, value in ast.iter_fields(node):
                children = value if isinstance(value, list) else [value]
                pending += [
                    (children, i) for i, child in enumerate(children) if isinstance(child, ast.AST) and child._fields
                ]
        return nodes

    def matches(self, pattern: Pattern) -> list[Match]:
        """Return all matches of a pattern in the order of the source, or [] if there are none."""
        matches: dict[object, Match] = {}  # with gaps, the same nodes can match in several ways
        for siblings, number in self._by_type[type(pattern.nodes[0])]:
            for match in pattern.match(siblings, number):
                matches[tuple(map(id, (match.nodes[0], match.nodes[-1], *match.bound.values())))] = match
        return sorted(matches.values(), key=lambda match: (match.nodes[0].lineno, match.nodes[0].col_offset))

    def exactly(self, count: int | None, pattern: Pattern) -> list[Match]:
        """Return all matches. Raise `UnrecognizedError` unless there are ``count`` matches (None: at least one)."""
        pattern.reached = 1
        matches = self.matches(pattern)
        if not matches and count != 0:
            raise unrecognized(f"`{pattern.line_reached}`", self)
        if count is not None and len(matches) != count:
            lines = ", ".join(str(match.nodes[0].lineno) for match in matches)
            raise unrecognized(f"exactly {count} `{pattern}`", self, f"{len(matches)} (lines {lines})")
        return matches

    def named(self, name: str) -> list[ast.FunctionDef | ast.ClassDef]:
        """Return the functions and classes with this name inside this definition, or [] if there are none."""
        inside = [siblings[i] for kind in (ast.FunctionDef, ast.ClassDef) for siblings, i in self._by_type[kind]]
        return [node for node in inside if node.name == name and node is not self.node]

    def text(self, node: Any) -> str:
        """Return the source text of ``node``."""
        return self.module.text[slice(*self.module.span(node))]


def first_line(node: Any) -> int:
    """Return the number of the first line of a statement, including its decorators."""
    decorators = getattr(node, "decorator_list", None)
    return int(min(decorators[0].lineno, node.lineno) if decorators else node.lineno)
