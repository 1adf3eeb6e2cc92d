"""Where the nodes of a syntax tree stand."""

from __future__ import annotations

import ast
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
    """A node as the list that it is in, and its number there."""

    siblings: list[Any]
    number: int

    @property
    def node(self) -> Any:
        return self.siblings[self.number]


def slots_in(root: ast.AST) -> list[Slot]:
    """A node and all that is in it."""
    found = [Slot([root], 0)]
    for slot in found:
        for _, value in ast.iter_fields(slot.node):
            siblings = value if isinstance(value, list) else [value]
            is_part = [isinstance(each, ast.AST) and bool(each._fields) for each in siblings]
            found += [Slot(siblings, number) for number, is_one in enumerate(is_part) if is_one]
    return found


def first_name(node: ast.AST) -> str:
    """The name of a definition, or the variable with which a node begins; "" where it begins with something else."""
    while not isinstance(node, ast.Name):
        if isinstance(name := getattr(node, "name", None), str):
            return name
        child = next(ast.iter_child_nodes(node), None)
        if child is None:
            return ""
        node = child
    return node.id
