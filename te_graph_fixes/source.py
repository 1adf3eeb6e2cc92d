"""TransformerEngine as source text: find it, parse it, match shapes in it, edit it.

Nothing here imports torch or TransformerEngine (TE). The same classes serve an installed TE and a source tree.
"""

from __future__ import annotations

import ast
import bisect
import importlib.machinery
import importlib.metadata
import importlib.util
import io
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias, TypeVar, cast

TE = "transformer_engine"
Statement = TypeVar("Statement", bound=ast.stmt)
_Places: TypeAlias = "dict[type[ast.AST], list[tuple[list[ast.stmt], int]]]"
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_HEADER = re.compile(r"([ \t]*)(?:def|class)[ \t]+")
_TOP_LEVEL = re.compile(r"^(?:@|def |class |async )", re.MULTILINE)
_DEFINITION = re.compile(_TOP_LEVEL.pattern + r".*\n(?:(?:[ \t)#].*)?\n)*", re.MULTILINE)
_NO_SYNTAX = {"type_comment", "kind"}
_DISTRIBUTIONS = (TE, "transformer-engine-cu13", "transformer-engine-cu12", "transformer_engine_torch")


class TENotFoundError(Exception):
    """There is no TransformerEngine where it was looked for."""


class UnrecognizedError(Exception):
    """A fix did not find the shape that it looks for, so it must not touch this source."""


@dataclass(frozen=True)
class Edit:
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

    @classmethod
    def installed(cls) -> Source:
        """The TE that ``import transformer_engine`` would find; raises `TENotFoundError`."""
        try:
            spec = importlib.util.find_spec(TE)
        except (ImportError, ValueError):  # ValueError: a stand-in without __spec__ in sys.modules
            spec = None
        if spec is None or not spec.submodule_search_locations:
            raise TENotFoundError(f"{TE} is not installed in this interpreter")
        location = next(iter(spec.submodule_search_locations))
        return cls(location, _version([os.path.dirname(location)]) or _version(None))

    @classmethod
    def at(cls, folder: str | Path) -> Source:
        """The TE in ``folder``: a site-packages folder, a checkout, or the package folder itself."""
        root = Path(folder)
        package = root if root.name == TE and (root / "__init__.py").is_file() else root / TE
        if not (package / "__init__.py").is_file():
            raise TENotFoundError(f"no {TE} package in {root}: expected {root / TE}/__init__.py")
        return cls(str(package), _version([str(package.parent)]))

    @cached_property
    def _modules(self) -> dict[str, ModuleSource | None]:
        return {}

    def forget_trees(self) -> None:
        """Let the syntax trees go, which are large; the texts stay, and are parsed again where that is needed."""
        for module in filter(None, self._modules.values()):
            for name in ("tree", "definitions", "known", "imports", "_places"):
                vars(module).pop(name, None)

    def find(self, name: str) -> ModuleSource | None:
        """The source of module ``name``, or None where this TE has no such module."""
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def module(self, name: str) -> ModuleSource:
        """The source of module ``name``; raises `UnrecognizedError` where there is none."""
        found = self.find(name)
        if found is None:
            raise UnrecognizedError(f"looked for module {name}, found none in {self.location}")
        return found

    def definition(self, name: str, qualname: str) -> Definition:
        """Function or class ``qualname`` of module ``name``; raises `UnrecognizedError` where there is none."""
        return self.module(name).definition(qualname)

    def _read(self, name: str) -> ModuleSource | None:
        parent = os.path.join(self.location, *name.split(".")[1:-1])
        spec = importlib.machinery.PathFinder.find_spec(name, [parent])
        if spec is None or spec.loader is None:
            return None
        try:
            text = cast(importlib.machinery.SourceFileLoader, spec.loader).get_source(name)
        except (OSError, ImportError, SyntaxError, UnicodeDecodeError) as error:
            raise UnrecognizedError(f"cannot read the source of {name} in {self.location}: {error}") from error
        if text is None:
            raise UnrecognizedError(f"{name} in {self.location} has no source text (only bytecode)")
        return ModuleSource(name, spec.origin or name, text)


def _version(path: list[str] | None) -> str | None:
    """The version of TE's distribution on ``path`` (None: `sys.path`), or of a checkout's VERSION.txt."""
    for name in _DISTRIBUTIONS:
        found = (
            importlib.metadata.distributions(name=name)
            if path is None
            else importlib.metadata.distributions(name=name, path=path)
        )
        for distribution in found:
            return distribution.version
    if path is not None:
        version_file = Path(path[0], "build_tools", "VERSION.txt")
        if version_file.is_file():
            return version_file.read_text().strip()
    return None


@dataclass(frozen=True)
class ModuleSource:
    """The text of one module and its syntax tree."""

    name: str
    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        try:
            return ast.parse(self.text, self.path)
        except (SyntaxError, ValueError) as error:  # ValueError: Python 3.10 for null bytes
            raise UnrecognizedError(f"cannot parse {self.path}: {error}") from error

    @cached_property
    def lines(self) -> list[str]:
        """The lines, with their line breaks, as Python counts them."""
        return list(io.StringIO(self.text))

    @cached_property
    def _line_starts(self) -> list[int]:
        return [0, *accumulate(map(len, self.lines))]

    @cached_property
    def definitions(self) -> dict[str, ast.FunctionDef | ast.ClassDef]:
        """Every class and function at module or class level, by qualified name; ambiguous names are left out."""
        return _definitions(self.tree)

    @cached_property
    def known(self) -> dict[str, ast.FunctionDef | ast.ClassDef]:
        """Those of the `definitions` that `find` has found."""
        return {}

    @cached_property
    def imports(self) -> list[ast.stmt]:
        """The imports at module level, whatever statements they are in."""
        try:
            body = ast.parse(_DEFINITION.sub("", self.text)).body
        except (SyntaxError, ValueError):
            body = [node for node in self.tree.body if not isinstance(node, _DEFINITIONS)]
        return [node for each in body for node in ast.walk(each) if isinstance(node, (ast.Import, ast.ImportFrom))]

    def find(self, qualname: str) -> Definition | None:
        """The function or class ``qualname`` (``name`` or ``Class.name``), or None."""
        node = self.known.get(qualname) or self._parsed_alone(qualname)
        if node is None and self._headers(qualname.rpartition(".")[2]):
            node = self.definitions.get(qualname)
        if node is None:
            return None
        self.known[qualname] = node
        return Definition(self, qualname, node)

    def _headers(self, name: str) -> list[tuple[int, str]]:
        """Where the lines start that look like the first of a function or class ``name``, and their indentation."""
        found = []
        for match in re.finditer(rf"{name}\b", self.text):
            start = self.text.rfind("\n", 0, match.start()) + 1
            header = _HEADER.fullmatch(self.text, start, match.start())
            if header:
                found.append((start, header[1]))
        return found

    def _parsed_alone(self, qualname: str) -> ast.FunctionDef | ast.ClassDef | None:
        """A definition, parsed from its own lines, much faster than with all of the module; None if in any doubt.

        What ends a function too early, a line of a string that is less indented say, leaves text that does not parse.
        """
        owner, _, name = qualname.rpartition(".")
        start, end, indent = 0, len(self.text), ""
        if owner:
            owners = [place for place, indent in self._headers(owner) if not indent]
            if len(owners) != 1:
                return None
            start = owners[0]
            following = _TOP_LEVEL.search(self.text, start + 1)
            end = following.start() if following else end
            indent = " " * 4
        places = [place for place, its in self._headers(name) if its == indent and start <= place < end]
        if len(places) != 1:
            return None
        first = last = self.line(places[0]) - 1
        while first and self.lines[first - 1].startswith((f"{indent}@", f"{indent}#")):
            first -= 1
        if first and self.lines[first - 1].startswith(f"{indent})"):
            return None  # of a decorator, perhaps
        inside = re.compile(rf"{indent}[ \t)]|[ \t]*(#|$)").match
        while last + 1 < len(self.lines) and inside(self.lines[last + 1]):
            last += 1
        opening = "\n" * (first - 1) + "if True:\n" if owner else "\n" * first
        try:
            body = ast.parse(opening + "".join(self.lines[first : last + 1]), self.path).body
        except (SyntaxError, ValueError):
            return None
        if owner:
            body = cast(ast.If, body[0]).body
        found = body[0]
        return found if len(body) == 1 and isinstance(found, (ast.FunctionDef, ast.ClassDef)) else None

    def definition(self, qualname: str) -> Definition:
        """The function or class ``qualname``; raises `UnrecognizedError` where there is none or more than one."""
        found = self.find(qualname)
        if found is None:
            raise UnrecognizedError(
                f"looked for one definition of {qualname} in {self.path}, found none or several "
                f"among its {len(self.definitions)} definitions"
            )
        return found

    def places(self, node: ast.AST) -> _Places:
        """The statements below a definition of this module, by type: each as a body and the place in it."""
        if node not in self._places:
            self._places[node] = _places(node)
        return self._places[node]

    @cached_property
    def _places(self) -> dict[ast.AST, _Places]:
        return {}

    def offset(self, line: int, column: int) -> int:
        """The character offset of a syntax tree position (1-based line, UTF-8 byte column)."""
        start = self._line_starts[line - 1]
        text = self.lines[line - 1]
        return start + (column if text.isascii() else len(text.encode()[:column].decode()))

    def line(self, offset: int) -> int:
        """The 1-based line that the character ``offset`` is in."""
        return bisect.bisect(self._line_starts, offset)

    def lines_with(self, name: str) -> Sequence[int]:
        """The 1-based lines that contain ``name``, in order."""
        if not name:
            return range(1, len(self.lines) + 1)
        found = []
        offset = self.text.find(name)
        while offset >= 0:
            found.append(self.line(offset))
            offset = self.text.find(name, offset + 1)
        return found

    def line_start(self, line: int) -> int:
        """The character offset at which 1-based ``line`` begins."""
        return self._line_starts[line - 1]


def _places(root: ast.AST) -> _Places:
    found: _Places = {}
    pending = [root]
    while pending:
        node = pending.pop()
        for field in ("body", "orelse", "handlers", "finalbody", "cases"):
            nodes = getattr(node, field, None)
            if isinstance(nodes, list):
                pending += nodes
                for place, item in enumerate(nodes):
                    if isinstance(item, ast.stmt):
                        found.setdefault(type(item), []).append((nodes, place))
    return found


def _definitions(tree: ast.Module) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    found: dict[str, list[ast.FunctionDef | ast.ClassDef]] = {}

    def visit(nodes: Iterable[ast.stmt], prefix: str) -> None:
        for node in nodes:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.setdefault(prefix + node.name, []).append(node)
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")

    visit(tree.body, "")
    return {name: nodes[0] for name, nodes in found.items() if len(nodes) == 1}


@dataclass(frozen=True)
class Definition:
    """One function or class, with the means to look for shapes in it and to edit them.

    A *pattern* is Python text. It is matched by syntax, so that layout and comments do not matter. A name that begins
    with ``ANY`` matches any expression, and a statement ``...`` inside a block matches any number of statements.
    The methods that return an `Edit` dedent their ``text`` and indent it as the node that it stands for; one line break
    at either end of it does not count.
    """

    module: ModuleSource
    qualname: str
    node: ast.FunctionDef | ast.ClassDef

    def all(self, pattern: str, within: ast.AST | None = None) -> list[ast.AST]:
        """Every statement, run of statements or expression here, or in the node ``within``, that matches, in order."""
        wanted = _parse_pattern(pattern)
        has_name = self._has_name(_longest_name(wanted[0] if isinstance(wanted, list) else wanted))
        found: list[ast.AST] = []
        if isinstance(wanted, list):
            for body, start in self.module.places(self.node).get(type(wanted[0]), []):
                run = body[start : start + len(wanted)]
                if has_name(run[0]) and _match_run(wanted, run):
                    found.append(run[0] if len(run) == 1 else _Run(run))
        else:
            pending: list[ast.AST] = [self.node]
            while pending:
                node = pending.pop()
                pending += filter(has_name, ast.iter_child_nodes(node))
                if isinstance(node, ast.expr) and _match(wanted, node):
                    found.append(node)
        if within is not None:
            start, end = self._span(within)
            found = [node for node in found if start <= self._span(node)[0] and self._span(node)[1] <= end]
        return sorted(found, key=lambda node: self._span(node)[0])

    def _has_name(self, name: str) -> Callable[[ast.AST], bool]:
        """Whether ``name`` can be in a node, by the lines of the node: few need a closer look then."""
        lines = self.module.lines_with(name)

        def has_name(node: ast.AST) -> bool:
            if not isinstance(node, (ast.stmt, ast.expr)):
                return True
            at = bisect.bisect_left(lines, node.lineno)
            return at < len(lines) and lines[at] <= node.end_lineno  # type: ignore[operator]

        return has_name

    def has(self, pattern: str, within: ast.AST | None = None) -> bool:
        """Whether the pattern matches at least once."""
        return bool(self.all(pattern, within))

    def one(self, *patterns: str, within: ast.AST | None = None) -> ast.AST:
        """The only match of the ``patterns``; raises `UnrecognizedError` if there is none or more than one."""
        return self.exactly(1, *patterns, within=within)[0]

    def exactly(self, count: int, *patterns: str, within: ast.AST | None = None) -> list[ast.AST]:
        """The matches of the ``patterns``; raises `UnrecognizedError` unless there are as many as ``count``."""
        found = [node for pattern in patterns for node in self.all(pattern, within)]
        if len(found) != count:
            wanted = "` or `".join(" ".join(pattern.split()) for pattern in patterns)
            lines = ", ".join(str(_first(node).lineno) for node in found)
            raise UnrecognizedError(
                f"looked for `{wanted}` exactly {'once' if count == 1 else f'{count} times'} in {self.qualname} "
                f"({self.module.path}:{self.node.lineno}), found it {len(found)} times"
                + (f" (lines {lines})" if lines else "")
            )
        return found

    def require_parameters(self, *names: str) -> None:
        """Raise `UnrecognizedError` unless this function has the parameters ``names``."""
        arguments = cast(ast.FunctionDef, self.node).args
        missing = set(names) - {argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)}
        if missing:
            raise UnrecognizedError(
                f"looked for parameters {sorted(missing)} of {self.qualname} ({self.module.path}), found none"
            )

    def statements(self, kind: type[Statement]) -> list[Statement]:
        """Every statement of a type in this definition, itself left out."""
        places = self.module.places(self.node).get(kind, [])
        return sorted((cast(Statement, body[place]) for body, place in places), key=lambda node: node.lineno)

    def inner(self, name: str) -> Definition:
        """The only function or class ``name`` inside this one; raises `UnrecognizedError` otherwise."""
        functions, classes = self.statements(ast.FunctionDef), self.statements(ast.ClassDef)
        inside: list[ast.FunctionDef | ast.ClassDef] = [*functions, *classes]
        found = [node for node in inside if node.name == name]
        if len(found) != 1:
            raise UnrecognizedError(
                f"looked for {name} exactly once in {self.qualname} ({self.module.path}:{self.node.lineno}), "
                f"found it {len(found)} times"
            )
        return Definition(self.module, f"{self.qualname}.{name}", found[0])

    def text(self, node: ast.AST) -> str:
        """The source text of ``node``."""
        start, end = self._span(node)
        return self.module.text[start:end]

    def replace(self, node: ast.AST, text: str) -> Edit:
        """Put ``text`` in the place of ``node``."""
        if isinstance(node, (ast.stmt, _Run)):
            self._whole_lines(node)
        start, end = self._span(node)
        return Edit(self.module.name, start, end, self._indented(node, text).lstrip())

    def insert_before(self, node: ast.AST, text: str) -> Edit:
        """Put the statements ``text`` on lines of their own before the statement ``node``."""
        start, _ = self._whole_lines(node)
        return Edit(self.module.name, start, start, self._indented(node, text) + "\n")

    def insert_at_start(self, text: str) -> Edit:
        """Put the statements ``text`` before the first one of this function, below its docstring."""
        body = self.node.body
        return self.insert_before(body[0 if ast.get_docstring(self.node) is None else 1], text)

    def insert_after(self, node: ast.AST, text: str) -> Edit:
        """Put the statements ``text`` on lines of their own after the statement ``node``."""
        _, end = self._whole_lines(node)
        return Edit(self.module.name, end, end, self._indented(node, text) + "\n")

    def delete(self, node: ast.AST) -> Edit:
        """Remove the whole lines of the statement ``node`` and the comment lines directly above it."""
        _, end = self._whole_lines(node)
        first = _first(node).lineno
        while self.module.lines[first - 2].strip().startswith("#"):
            first -= 1
        return Edit(self.module.name, self.module.line_start(first), end, "")

    def _whole_lines(self, node: ast.AST) -> tuple[int, int]:
        """Where the lines of a statement start and end; raises `UnrecognizedError` if others stand on them too."""
        start, end = self._span(node)
        first = self.module.line_start(_first(node).lineno)
        last = self.module.line_start(cast(int, _last(node).end_lineno) + 1)
        after = self.module.text[end:last].strip()
        if self.module.text[first:start].strip() or (after and not after.startswith("#")):
            raise UnrecognizedError(
                f"looked for a statement on lines of its own in {self.qualname} ({self.module.path}), found "
                f"`{self.module.text[first:last].strip()}`"
            )
        return first, last

    def _span(self, node: ast.AST) -> tuple[int, int]:
        first, last = _first(node), _last(node)
        return (
            self.module.offset(first.lineno, first.col_offset),
            self.module.offset(cast(int, last.end_lineno), cast(int, last.end_col_offset)),
        )

    def _indented(self, node: ast.AST, text: str) -> str:
        start = self.module.line_start(_first(node).lineno)
        indent = cast(re.Match[str], re.compile(r"[ \t]*").match(self.module.text, start)).group()
        return textwrap.indent(textwrap.dedent(text.removeprefix("\n")).removesuffix("\n"), indent)


class _Run(ast.AST):
    """Consecutive statements that matched a pattern of several statements."""

    def __init__(self, statements: Sequence[ast.stmt]) -> None:
        super().__init__()
        self.statements = list(statements)


def _first(node: ast.AST) -> ast.stmt:
    return cast(ast.stmt, node.statements[0] if isinstance(node, _Run) else node)


def _last(node: ast.AST) -> ast.stmt:
    return cast(ast.stmt, node.statements[-1] if isinstance(node, _Run) else node)


def _parse_pattern(pattern: str) -> ast.expr | list[ast.stmt]:
    body = ast.parse(textwrap.dedent(pattern)).body
    if len(body) == 1 and isinstance(body[0], ast.Expr):
        return body[0].value
    return body


def _longest_name(wanted: ast.AST) -> str:
    names = [str(getattr(node, "id", getattr(node, "attr", ""))) for node in ast.walk(wanted)]
    return max((name for name in names if not name.startswith("ANY")), key=len, default="")


def _is_gap(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is Ellipsis


def _match_run(wanted: Sequence[ast.AST], found: Sequence[ast.AST]) -> bool:
    if not wanted:
        return not found
    if _is_gap(wanted[0]):
        return any(_match_run(wanted[1:], found[skip:]) for skip in range(len(found) + 1))
    return bool(found) and _match(wanted[0], found[0]) and _match_run(wanted[1:], found[1:])


def _match(wanted: object, found: object) -> bool:
    if type(wanted) is not type(found):
        return isinstance(wanted, ast.expr_context) or (_is_any(wanted) and isinstance(found, ast.expr))
    if isinstance(wanted, ast.AST):
        if _is_any(wanted):
            return True
        for field in wanted._fields:
            if field not in _NO_SYNTAX and not _match(getattr(wanted, field, None), getattr(found, field, None)):
                return False
        return True
    if isinstance(wanted, list):
        return _match_run(wanted, cast("list[ast.AST]", found))
    return wanted == found


def _is_any(wanted: object) -> bool:
    return isinstance(wanted, ast.Name) and wanted.id.startswith("ANY")
