"""A function or class of TransformerEngine (TE), in which shapes are looked for."""

from __future__ import annotations

import ast
import difflib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from .matching import Match, Pattern, extent, heads_of, without_blocks

if TYPE_CHECKING:
    from .source import ModuleSource

_LONGEST = 70
"""How many characters of a statement are shown."""


class Miss(NamedTuple):
    """The closest miss of a pattern: how many of its statements match, and where and how the next one differs."""

    matched: int
    text: str


class UnrecognizedError(Exception):
    """A fix did not find the shape that it looks for, so it must not touch this source.

    ``closest`` finds the closest miss, which takes a while; ``details`` say more than the text.
    """

    def __init__(self, text: str, closest: Callable[[], Miss] | None = None, details: str = "") -> None:
        super().__init__(text)
        self.closest = closest or (lambda: Miss(-1, text))
        self.details = details or text


def unrecognized(
    wanted: str, where: object, found: str = "none", closest: Callable[[], Miss] | None = None
) -> UnrecognizedError:
    """The error to raise where ``wanted`` is not in ``where``: a `Definition`, or a path."""
    return UnrecognizedError(f"looked for {wanted} in {where}, found {found}", closest)


@dataclass(frozen=True)
class Definition:
    """One function or class, with the means to look for shapes in it: a `matching.Pattern`, or its text."""

    module: ModuleSource
    qualname: str
    node: ast.FunctionDef | ast.ClassDef
    _inner: dict[str, Definition] = field(default_factory=dict, init=False, compare=False)

    def __str__(self) -> str:
        return f"{self.qualname} ({self.module.path}:{getattr(self.node, 'lineno', 1)})"

    @cached_property
    def _nodes(self) -> dict[type, list[tuple[list[Any], int]]]:
        """All nodes in it by type: the list that has the node, and its index there."""
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

    def matches(self, pattern: str | Pattern) -> list[Match]:
        """Every statement, run of statements or expression here that matches, in order."""
        pattern = Pattern.of(pattern) if isinstance(pattern, str) else pattern
        matches: dict[object, Match] = {}
        for siblings, number in (node for kind in pattern.kinds for node in self._nodes[kind]):
            for match in pattern.match(siblings, number):
                matches[tuple(map(extent, (match.nodes[0], match.nodes[-1], *match.bound.values())))] = match
        return sorted(matches.values(), key=lambda match: (extent(match.nodes[0]), extent(match.nodes[-1])))

    def has(self, pattern: str | Pattern) -> bool:
        """Whether the pattern matches at least once."""
        return bool(self.matches(pattern))

    def one(self, pattern: str) -> Any:
        """The first node of the only match; raises `UnrecognizedError` if there is none, or more."""
        return self.exactly(1, pattern)[0].nodes[0]

    def exactly(self, count: int | None, pattern: str | Pattern) -> list[Match]:
        """The matches; raises `UnrecognizedError` unless there are as many as ``count``, or at least one for None."""
        pattern = Pattern.of(pattern) if isinstance(pattern, str) else pattern
        matches = self.matches(pattern)
        if len(matches) != count and not (count is None and matches):
            times = {None: "at least once", 1: "exactly once"}.get(count, f"exactly {count} times")
            lines = f" (lines {', '.join(str(match.nodes[0].lineno) for match in matches)})" if matches else ""
            closest = None if matches else lambda: self.closest(pattern)
            found = "it once" if len(matches) == 1 else f"it {len(matches)} times"
            raise unrecognized(f"`{pattern}` {times}", self, found + lines, closest)
        return matches

    def closest(self, pattern: Pattern) -> Miss:
        """Where the longest beginning of a pattern matches, and what differs after it."""
        heads = [*heads_of(self.node.body)]
        beginnings = [pattern.beginning(heads[start:]) for start in range(len(heads))]
        count, wanted, other = max(beginnings, key=lambda beginning: beginning[0], default=(0, None, None))
        looked = f"looked for {_in_short(wanted or pattern.nodes[0])}"
        if count and not wanted:
            looked = "looked for the end of a block, or for the same text in place of the same ANY_NAME"
        elif not count:
            by_text = {_in_short(head): head for head in reversed(heads)}
            similar = difflib.get_close_matches(_in_short(pattern.nodes[0]), by_text, 1)
            other = by_text[similar[0]] if similar else None
        ending = _in_short(other) if other else "the end" if count else f"none in {self.qualname}"
        file = self.module.name.removeprefix("transformer_engine.pytorch.").replace(".", "/")
        return Miss(count, f"{file}.py:{getattr(other or self.node, 'lineno', 1)}: {looked}, found {ending}")

    def inner(self, name: str) -> Definition:
        """The only function or class ``name`` inside this one; raises `UnrecognizedError` otherwise."""
        if name not in self._inner:
            inside = [siblings[i] for kind in (ast.FunctionDef, ast.ClassDef) for siblings, i in self._nodes[kind]]
            nodes = [node for node in inside if node.name == name and node is not self.node]
            if len(nodes) != 1:
                raise unrecognized(f"{name} exactly once", self, f"it {len(nodes)} times")
            self._inner[name] = Definition(self.module, f"{self.qualname}.{name}", nodes[0])
        return self._inner[name]

    def text(self, node: Any) -> str:
        """The source text of ``node``."""
        return self.module.text[slice(*self.module.span(node))]


def _in_short(head: Any) -> str:
    """The first line of a statement, or an expression, as far as it is shown."""
    text = ast.unparse(without_blocks(head)).partition("\n")[0]
    return f"`{text if len(text) <= _LONGEST else f'{text[: _LONGEST - 3]}...'}`"
