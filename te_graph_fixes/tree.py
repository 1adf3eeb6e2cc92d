"""Where the nodes of a syntax tree stand, and which names statements set."""

from __future__ import annotations

import ast
from bisect import bisect_right
from collections.abc import Iterator
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

Node: TypeAlias = "ast.expr | ast.stmt"
Position: TypeAlias = "tuple[int, int]"

BLOCKS = {"body", "orelse", "finalbody"}


def first_line(node: Any) -> int:
    """The first line of a statement, decorators included."""
    decorators = getattr(node, "decorator_list", None)
    return int(min(decorators[0].lineno, node.lineno) if decorators else node.lineno)


def extent(node: Any) -> tuple[Position, Position]:
    """Where a node starts and ends: lines, and columns in bytes."""
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


class Slot(NamedTuple):
    """A node as the list that it is in, and its number there; of a statement, its lines, and the one that it is in."""

    siblings: list[Any]
    number: int
    first: int = 0
    last: int = 0
    outer: Slot | None = None

    @property
    def node(self) -> Any:
        return self.siblings[self.number]


def statements(root: ast.stmt) -> list[Slot]:
    """A statement and those in it, by their first lines."""
    found = [Slot([root], 0, first_line(root), root.end_lineno or 0)]
    for slot in found:
        for block in blocks_of(slot.node):
            found += [
                Slot(block, number, first_line(child), child.end_lineno, slot) for number, child in enumerate(block)
            ]
    return sorted(found, key=itemgetter(2))


def blocks_of(node: ast.AST) -> Iterator[list[Any]]:
    """The blocks of a statement."""
    for part in node._fields:
        if part in BLOCKS:
            yield getattr(node, part)
        elif part in ("handlers", "cases"):
            yield from (each.body for each in getattr(node, part))


def standing_in(slots: list[Slot], line: int) -> list[Slot]:
    """Those of the `statements` that stand in a line, inner ones first."""
    found: list[Slot] = []
    for slot in reversed(slots[: bisect_right(slots, line, key=lambda slot: slot.first)]):
        if slot.last >= line:
            found.append(slot)
        elif found:
            break
    while found and found[-1].outer:
        found.append(found[-1].outer)
    return found


def nodes(root: ast.AST, line: int | None = None) -> list[Slot]:
    """All that is in a node, or what stands in a line of it, as far as it is an expression."""
    found = [Slot([root], 0)]
    for slot in found:
        for part in slot.node._fields:
            value = getattr(slot.node, part, None)
            siblings = value if isinstance(value, list) else [value]
            for number, child in enumerate(siblings):
                if not isinstance(child, ast.AST) or not child._fields:
                    continue
                if line is None or getattr(child, "lineno", line) <= line <= getattr(child, "end_lineno", line):
                    found.append(Slot(siblings, number))
    return found


def is_in(node: Any, outer: Any) -> bool:
    """Whether a node is a part of another, or that itself."""
    (start, end), (first, last) = extent(node), extent(outer)
    return first <= start and end <= last


def targets_in(statement: ast.AST) -> list[Any]:
    """All nodes that a statement sets or deletes, tuples too, without the variables of comprehensions."""
    parts = [*ast.walk(statement)]
    local = {name for part in parts if isinstance(part, ast.comprehension) for name in ast.walk(part.target)}
    return [
        part for part in parts if isinstance(getattr(part, "ctx", None), (ast.Store, ast.Del)) and part not in local
    ]


def names_set_by(statement: ast.AST) -> Iterator[list[str]]:
    """The `_names` of all that a statement sets or deletes, without the variables of comprehensions."""
    yield from ([part.name] for part in ast.walk(statement) if isinstance(part, ast.ExceptHandler) and part.name)
    for part in targets_in(statement):
        if isinstance(part, (ast.Name, ast.Attribute, ast.Subscript)):
            yield _names(part)


def _names(target: ast.AST) -> list[str]:
    """``a, b, c`` of ``a.b[0].c``; empty for what does not begin with a variable."""
    match target:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=owner, attr=name):
            return [*names, name] if (names := _names(owner)) else []
        case ast.Subscript(value=owner):
            return _names(owner)
    return []
