"""The names that a piece of text reads and sets, and those that stand at a place of a module."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from .matching import is_in
from .source import Definition, ModuleSource, unrecognized

_FIRST = {"generators": 0, "iter": 0, "value": 1}
"""The parts of a node that are computed before the others."""
_COMPARING = (ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.unaryop, ast.Constant, ast.expr_context)


def used_names(nodes: Iterable[ast.AST]) -> tuple[set[str], set[str]]:
    """The names that are read before they are set, and all that are set."""
    reads, sets = set[str](), set[str]()
    for node in nodes:
        _note_names(node, reads, sets)
    return reads, sets


def _note_names(node: Any, reads: set[str], sets: set[str]) -> None:
    """Add the names in a node, as they are used."""
    target = node.target if isinstance(node, ast.AugAssign) else node
    if isinstance(target, ast.Name) and (target is not node or isinstance(node.ctx, ast.Load)):
        reads.update({target.id} - sets)
    if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.ExceptHandler)):
        sets.update(_set_by(node))
    for part in _in_order(node.__class__):
        value = getattr(node, part, None)
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                _note_names(child, reads, sets)
    sets.update(_set_by(node))


@cache
def _in_order(kind: Any) -> list[str]:
    """The parts of a type of node in the order in which they are computed."""
    return sorted(kind._fields, key=lambda part: _FIRST.get(part, 2))


def _set_by(node: Any) -> Sequence[str]:
    """The name that a node itself sets, if it does."""
    if isinstance(node, ast.Name):
        return () if isinstance(node.ctx, ast.Load) else (node.id,)
    if isinstance(node, ast.arg):
        return (node.arg,)
    if isinstance(node, ast.alias):
        return ((node.asname or node.name).partition(".")[0],)
    if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.ExceptHandler)) and node.name:
        return (node.name,)
    return ()


def require_names(place: Definition, at: Any, names: set[str]) -> None:
    """Raise `UnrecognizedError` where text at the node ``at`` of a place could not read one of the names."""
    missing = names - vars(builtins).keys() - place.module.names
    if not missing:
        return
    for node in _around(place.module.tree, at):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            missing -= _names_of(place.module, node)
    for name in sorted(missing):
        raise unrecognized(f"a parameter or variable {name}", place)


def require_unswitched(place: Definition, at: Any, known: Sequence[Any]) -> None:
    """Raise `UnrecognizedError` where a node stands in a condition, other than those ``known``, that may be a switch.

    What is no switch compares variables that the function reads elsewhere too.
    """
    function = place.outer or place.node
    conditions = [node for node in ast.walk(function) if isinstance(node, (ast.If, ast.IfExp, ast.While))]
    tests = [node.test for node in conditions if node not in known and is_in(at, node) and not is_in(at, node.test)]
    if not tests:
        return
    in_tests = {node for test in tests for node in ast.walk(test)}
    read = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and node not in in_tests}
    for node in in_tests:
        is_variable = isinstance(node, ast.Name) and node.id in read - place.module.names
        if not is_variable and not isinstance(node, _COMPARING):
            raise unrecognized("a correction that cannot be switched off", place, f"`{ast.unparse(node)}` around it")


def _around(root: ast.AST, at: Any) -> Iterator[ast.AST]:
    """The statements below ``root`` that a node is in."""
    blocks = [root]
    for block in blocks:
        statements = (node for node in ast.iter_child_nodes(block) if isinstance(node, (ast.stmt, ast.ExceptHandler)))
        blocks += [node for node in statements if is_in(at, node)]
    yield from blocks


def _names_of(module: ModuleSource, function: ast.AST) -> set[str]:
    """The parameters and variables of a function, and what it defines and imports."""
    known: set[str] | None = module.cache.get((_names_of, function))
    if known is None:
        known, pending = set(), [function]
        for node in pending:
            for child in ast.iter_child_nodes(node):
                known.update(_set_by(child))
                if not isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                    pending.append(child)
        module.cache[_names_of, function] = known
    return known
