"""Whether a correction that stands in TransformerEngine's source has its effect, as far as one can tell."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator, Sequence, Set
from functools import cache
from typing import Any

from .matching import WORD, Pattern, without_annotation
from .source import Definition, UnrecognizedError, unrecognized
from .tree import Node, Slot, blocks_of, first_line, is_in, nodes, standing_in, targets_in

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LEAVING = (ast.Return, ast.Break, ast.Continue)


class NotInForceError(UnrecognizedError):
    """A correction of upstream's stands in the source, and may have no effect."""


def _not_in_force(wanted: str, place: Definition, found: str) -> NotInForceError:
    return NotInForceError(*unrecognized(wanted, place, found).args)


def require_in_force(
    place: Definition, at: Node, pattern: Pattern, known: Sequence[Node], conditions: Sequence[str]
) -> None:
    """Raise `NotInForceError` where a node may not be run, or what it does is undone, as far as one can tell.

    It may not be run where it stands in something conditional, or below what leaves. The ``known`` nodes are those of
    the correction itself and do not count, nor do tests that are among the ``conditions``, which are patterns. It is
    undone where what its ``pattern`` sets is changed below it.
    """
    statements, _ = place.outline
    around = standing_in(statements, at.lineno)
    _require_run(place, at, around, known, conditions)
    statement = without_annotation(at if isinstance(at, ast.stmt) else around[0].node)
    target = {ast.unparse(statement.targets[0])} if isinstance(statement, ast.Assign) else set()
    _require_kept(place, around, _made_by(pattern) | target, known)


def _require_run(
    place: Definition, at: Node, around: Sequence[Slot], known: Sequence[Node], conditions: Sequence[str]
) -> None:
    """Raise `NotInForceError` where a node is not run, or only in a condition that TE has not."""
    _, lines_of = place.outline
    in_line = [*around, *nodes(around[0].node, at.lineno)]
    tests = [*_tests_around(at, [slot.node for slot in in_line], known)]
    for slot in around:
        for above in slot.siblings[: slot.number]:
            if isinstance(above, ast.Raise) or _cached(place, _leaves, above):
                if not isinstance(above, ast.If):
                    raise _not_in_force("a correction that is reached", place, f"what leaves above line {at.lineno}")
                if any(map(_leaves, above.body)):
                    tests.append(_negated(above.test))
                if any(map(_leaves, above.orelse)):
                    tests.append(above.test)
        is_inner = slot.outer and slot.node not in known and isinstance(slot.node, _DEFINITIONS)
        if is_inner and len(lines_of[slot.node.name]) == 1:
            raise _not_in_force("a correction that is used", place, f"it in {slot.node.name}, which is not")
        if slot.outer and slot.outer.node not in known and _is_left_out(slot.siblings, slot.outer.node):
            raise _not_in_force("a correction that is always run", place, f"it below line {slot.outer.first}")
    for test in tests:
        if not any([*Pattern.of(condition).match([test], 0)] for condition in conditions):
            raise _not_in_force("a correction that is always run", place, f"it where `{ast.unparse(test)}`")


def _require_kept(place: Definition, around: Sequence[Slot], made: Set[str], known: Sequence[Node]) -> None:
    """Raise `NotInForceError` where what is ``made`` is changed below, in a block that one stands in."""
    statements, lines_of = place.outline
    variables = {WORD.findall(text)[0] for text in made if WORD.search(text)}
    blocks = itertools.takewhile(lambda slot: not isinstance(slot.node, ast.FunctionDef), around)
    for later in (node for slot in blocks for node in slot.siblings[slot.number + 1 :] if node not in known):
        for line in sorted({line for name in variables for line in lines_of[name] if line in _lines(later)}):
            inner = [slot.node for slot in standing_in(statements, line) if is_in(slot.node, later)]
            is_defined = any(isinstance(node, _DEFINITIONS) for node in inner)
            if not is_defined and not made.isdisjoint(_cached(place, _texts_of_changed, inner[0])):
                raise _not_in_force("a correction that stays", place, f"`{ast.unparse(inner[0])}` below it")


def _lines(node: Any) -> range:
    return range(first_line(node), node.end_lineno + 1)


def _tests_around(at: Node, there: Sequence[Any], known: Sequence[Node]) -> Iterator[ast.expr]:
    """The conditions, of those nodes that are ``there``, which have to hold for a node to be run."""
    for node in there:
        if isinstance(node, (ast.If, ast.IfExp, ast.While)) and node not in known and is_in(at, node):
            orelse = node.orelse if isinstance(node.orelse, list) else [node.orelse]
            if any(is_in(at, part) for part in orelse):
                yield _negated(node.test)
            elif not is_in(at, node.test):
                yield node.test
        elif isinstance(node, ast.BoolOp) and node not in (at, *known) and is_in(at, node):
            above = itertools.takewhile(lambda value: not is_in(at, value), node.values)
            yield from (value if isinstance(node.op, ast.And) else _negated(value) for value in above)


def _negated(test: ast.expr) -> ast.expr:
    is_not = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    return test.operand if is_not else ast.UnaryOp(ast.Not(), test)  # type: ignore[attr-defined]


def _leaves(statement: ast.AST, kinds: tuple[type[ast.AST], ...] = _LEAVING) -> bool:
    """Whether a statement may leave the block that it is in, other than by an error."""
    if isinstance(statement, _DEFINITIONS):
        return False
    if isinstance(statement, (ast.For, ast.While)):  # a ``break`` in its ``else`` leaves the loop around
        return any(_leaves(each, (ast.Return,)) for each in statement.body) or any(map(_leaves, statement.orelse))
    return isinstance(statement, kinds) or any(_leaves(each, kinds) for block in blocks_of(statement) for each in block)


def _is_left_out(block: list[Any], owner: Any) -> bool:
    """Whether a block may be skipped other than by an ``if``: a handler, a loop's ``else``, a loop over nothing."""
    if isinstance(owner, ast.For) and not getattr(owner.iter, "elts", [owner.iter]):
        return True
    return block is not getattr(owner, "body", None) and not isinstance(owner, ast.If)


def _cached(place: Definition, find: Callable[[Any], Any], node: ast.AST) -> Any:
    """What ``find`` says of a node; asked once."""
    cache = place.module.cache
    if (find, node) not in cache:
        cache[find, node] = find(node)
    return cache[find, node]


def _changed(statement: ast.AST) -> Iterator[Any]:
    """What a statement sets or deletes, or calls a method of, as in ``x.clear()`` or ``n = x.pop()``.

    An assignment like ``x = f(x)`` does not count as setting ``x``, and variables of comprehensions do not count.
    """
    statement = without_annotation(statement)
    if isinstance(statement, _DEFINITIONS):
        return
    kept = set(map(ast.unparse, ast.walk(statement.value))) if isinstance(statement, ast.Assign) else set()
    for part in targets_in(statement):
        is_slice = isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Slice)
        target = part.value if is_slice else part
        if ast.unparse(target) not in kept:
            yield target
    for part in ast.walk(statement):
        value = getattr(part, "value", None)
        if isinstance(part, ast.stmt) and isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            yield value.func.value


@cache
def _made_by(pattern: Pattern) -> Set[str]:
    """What a pattern sets, or calls a method of, with the containers around it."""
    changed = (part for node in pattern.nodes for part in _changed(node))
    return {text for part in changed for text in _with_containers(part) if "ANY" not in text}


def _texts_of_changed(statement: ast.AST) -> set[str]:
    return set(map(ast.unparse, _changed(statement)))


def _with_containers(part: Any) -> Iterator[str]:
    """The text of ``a.b[0][1]``, of ``a.b[0]`` and of ``a.b``."""
    yield ast.unparse(part)
    if isinstance(part, ast.Subscript):
        yield from _with_containers(part.value)
