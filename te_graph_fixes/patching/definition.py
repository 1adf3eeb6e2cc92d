"""A function or class of TransformerEngine (TE), in which shapes are looked for."""

from __future__ import annotations

import ast
import difflib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from .matching import Match, Pattern, Slot, extent, first_name, heads_of, in_short, slots_in

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
    def slots(self) -> Mapping[tuple[type, str], list[Slot]]:
        """All nodes in it, itself included, by their type and `first_name`, and by their type and ""."""
        slots = defaultdict[tuple[type, str], list[Slot]](list)
        for slot in slots_in(self.node):
            for name in {"", first_name(slot.node)}:
                slots[type(slot.node), name].append(slot)
        return slots

    def matches(self, pattern: str | Pattern) -> list[Match]:
        """Every statement, run of statements or expression here that matches, in order."""
        pattern = Pattern.of(pattern) if isinstance(pattern, str) else pattern
        matches: dict[object, Match] = {}
        for slot in (slot for kind in pattern.kinds for slot in self.slots[kind, pattern.first_name]):
            for match in pattern.match(slot.siblings, slot.number):
                matches[tuple(map(extent, (match.nodes[0], match.nodes[-1], *match.bound.values())))] = match
        return sorted(matches.values(), key=lambda match: (extent(match.nodes[0]), extent(match.nodes[-1])))

    def has(self, pattern: str | Pattern) -> bool:
        """Whether the pattern matches at least once."""
        return bool(self.matches(pattern))

    def one(self, pattern: str) -> Any:
        """The first node of the only match; raises `UnrecognizedError` if there is none, or more."""
        return self.exactly(1, pattern)[0].nodes[0]

    def exactly(self, count: int, pattern: str | Pattern) -> list[Match]:
        """The matches; raises `UnrecognizedError` unless there are as many as ``count``."""
        pattern = Pattern.of(pattern) if isinstance(pattern, str) else pattern
        matches = self.matches(pattern)
        if len(matches) != count:
            times = "once" if count == 1 else f"{count} times"
            lines = f" (lines {', '.join(str(match.nodes[0].lineno) for match in matches)})" if matches else ""
            closest = None if matches else lambda: self.closest(pattern)
            raise unrecognized(f"`{pattern}` exactly {times}", self, f"it {len(matches)} times{lines}", closest)
        return matches

    def closest(self, pattern: Pattern) -> Miss:
        """Where the longest beginning of a pattern matches, and what differs after it."""
        heads = [*heads_of(self.node.body)]
        ways = [pattern.beginning(heads[start:]) for start in range(len(heads))]
        matched, wanted, found = max(ways, key=lambda way: way[0], default=(0, None, None))
        looked = f"looked for `{_cut(in_short(wanted or pattern.nodes[0]))}`"
        if not matched:
            by_text = {in_short(head): head for head in reversed(heads)}
            similar = difflib.get_close_matches(in_short(pattern.nodes[0]), by_text, 1)
            if not similar:
                return Miss(0, f"{self._line(self.node)}: {looked}, found none in {self.qualname}")
            found = by_text[similar[0]]
        elif wanted is None:
            looked = "looked for the end of a block"
        ending = f"`{_cut(in_short(found))}`" if found else "the end"
        return Miss(matched, f"{self._line(found or self.node)}: {looked}, found {ending}")

    def _line(self, node: Any) -> str:
        file = self.module.name.removeprefix("transformer_engine.pytorch.").replace(".", "/")
        return f"{file}.py:{getattr(node, 'lineno', 1)}"

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

    def text(self, node: Any) -> str:
        """The source text of ``node``."""
        return self.module.text[slice(*self.module.span(node))]


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
