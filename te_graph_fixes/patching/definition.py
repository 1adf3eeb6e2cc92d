"""A function or class of TransformerEngine (TE), in which shapes are looked for."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, cast

from .matching import Match, Node, Pattern, Slot, extent, first_name, slots_in

if TYPE_CHECKING:
    from .source import ModuleSource


class UnrecognizedError(Exception):
    """A fix did not find the shape that it looks for, so it must not touch this source; ``details`` say more."""

    def __init__(self, text: str, details: str = "") -> None:
        super().__init__(text)
        self.details = details or text


def unrecognized(wanted: str, where: object, found: str = "none") -> UnrecognizedError:
    """The error to raise where ``wanted`` is not in ``where``: a `Definition`, or a path."""
    return UnrecognizedError(f"looked for {wanted} in {where}, found {found}")


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
    def slots(self) -> Mapping[tuple[type, str], list[Slot]]:
        """All nodes in it, itself included, by their type and `first_name`, and by their type and ""."""
        found = defaultdict[tuple[type, str], list[Slot]](list)
        for slot in slots_in(self.node):
            for name in {"", first_name(slot.node)}:
                found[type(slot.node), name].append(slot)
        return found

    def matches(self, pattern: str | Pattern) -> list[Match]:
        """Every statement, run of statements or expression here that matches, in order."""
        pattern = Pattern.of(pattern) if isinstance(pattern, str) else pattern
        found: dict[object, Match] = {}
        for slot in (slot for kind in pattern.kinds for slot in self.slots[kind, pattern.first_name]):
            for match in pattern.match(slot.siblings, slot.number):
                found[tuple(map(extent, (match.node, *match.values())))] = match
        return sorted(found.values(), key=lambda match: extent(match.node))

    def all(self, pattern: str) -> list[Node]:
        """The nodes of the `matches`."""
        return [match.node for match in self.matches(pattern)]

    def has(self, pattern: str | Pattern) -> bool:
        """Whether the pattern matches at least once."""
        return bool(self.matches(pattern))

    def one(self, pattern: str) -> Node:
        """The node of the only match; raises `UnrecognizedError` if there is none, or more."""
        return self.exactly(1, pattern)[0].node

    def exactly(self, count: int, pattern: str | Pattern) -> list[Match]:
        """The matches; raises `UnrecognizedError` unless there are as many as ``count``."""
        found = self.matches(pattern)
        if len(found) != count:
            times = "once" if count == 1 else f"{count} times"
            lines = f" (lines {', '.join(str(match.node.lineno) for match in found)})" if found else ""
            raise unrecognized(
                f"`{' '.join(str(pattern).split())}` exactly {times}", self, f"it {len(found)} times{lines}"
            )
        return found

    @property
    def parameters(self) -> set[str]:
        """The names of this function's parameters."""
        arguments = cast(ast.FunctionDef, self.node).args
        return {argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)}

    def inner(self, name: str) -> Definition:
        """The only function or class ``name`` inside this one; raises `UnrecognizedError` otherwise."""
        if name not in self._inner:
            nodes = [slot.node for slot in (*self.slots[ast.FunctionDef, name], *self.slots[ast.ClassDef, name])]
            found = [node for node in nodes if node is not self.node]
            if len(found) != 1:
                raise unrecognized(f"{name} exactly once", self, f"it {len(found)} times")
            self._inner[name] = Definition(self.module, f"{self.qualname}.{name}", found[0])
        return self._inner[name]

    def text(self, node: Node) -> str:
        """The source text of ``node``."""
        return self.module.text[slice(*self.module.span(node))]
