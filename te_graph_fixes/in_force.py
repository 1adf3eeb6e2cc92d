"""Whether a correction that stands in TransformerEngine's source has its effect, as far as one can tell."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import takewhile
from typing import Any

from .matching import WORD, Pattern, without_annotation
from .source import Definition, is_among, unrecognized
from .tree import Node, Slot, blocks_of, extent, is_in, nodes, standing_in, targets_in

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LEAVING = (ast.Return, ast.Break, ast.Continue)


def require_in_force(
    place: Definition, at: Node, words: Set[str], known: Sequence[Node], conditions: Sequence[str]
) -> None:
    """Raise `UnrecognizedError` where a node may be left out, or what it does is undone, as far as one can tell.

    It is left out by what stands around it, other than the ``known`` nodes, or leaves above it; but for TE's own
    ``conditions``, which are patterns. It is undone where what it sets is changed below it, as far as the ``words`` of
    its pattern name that.
    """
    statements, _ = place.outline
    around = standing_in(statements, at.lineno)
    statement = without_annotation(at if isinstance(at, ast.stmt) else around[0].node)
    _require_run(place, at, around, known, conditions)
    _require_set_above(place, statement, around)
    _require_kept(place, statement, around, words, known)


def _require_run(
    place: Definition, at: Node, around: Sequence[Slot], known: Sequence[Node], conditions: Sequence[str]
) -> None:
    """Raise `UnrecognizedError` where a node is not run, or only in a condition that TE has not."""
    _, lines_of = place.outline
    in_line = [*around, *nodes(around[0].node, at.lineno)]
    tests = [*_tests_around(at, [slot.node for slot in in_line], known)]
    for slot in around:
        for above in slot.siblings[: slot.number]:
            if isinstance(above, ast.Raise) or _cached(place, _leaves, above):
                if not isinstance(above, ast.If):
                    raise unrecognized("a correction that is reached", place, f"what leaves above line {at.lineno}")
                if any(map(_leaves, above.body)):
                    tests.append(_negated(above.test))
                if any(map(_leaves, above.orelse)):
                    tests.append(above.test)
        is_inner = slot.outer and slot.node not in known and isinstance(slot.node, _DEFINITIONS)
        if is_inner and len(lines_of[slot.node.name]) == 1:
            raise unrecognized("a correction that is used", place, f"it in {slot.node.name}, which is not")
        if slot.outer and slot.outer.node not in known and _is_left_out(slot.siblings, slot.outer.node):
            raise unrecognized("a correction that is always run", place, f"it below line {slot.outer.first}")
    for test in tests:
        if not any([*Pattern.of(condition).match([test], 0)] for condition in conditions):
            raise unrecognized("a correction that is always run", place, f"it where `{ast.unparse(test)}`")


def _require_kept(
    place: Definition, statement: Any, around: Sequence[Slot], words: Set[str], known: Sequence[Node]
) -> None:
    """Raise `UnrecognizedError` where what a statement sets is changed below it, in a block that it stands in."""
    _, lines_of = place.outline
    made = {text for part in _changed(statement) for text in _with_containers(part) if set(WORD.findall(text)) <= words}
    made |= {ast.unparse(statement.targets[0])} if isinstance(statement, ast.Assign) else set()
    variables = {WORD.findall(text)[0] for text in made if WORD.search(text)}
    blocks = takewhile(lambda slot: not isinstance(slot.node, ast.FunctionDef), around)
    for later in (node for slot in blocks for node in slot.siblings[slot.number + 1 :]):
        is_named = later not in known and any(is_among(lines_of[name], later) for name in variables)
        if is_named and not made.isdisjoint(_cached(place, _texts_of_changed, later)):
            raise unrecognized("a correction that stays", place, f"`{ast.unparse(later)}` below it")


def _tests_around(at: Node, there: Sequence[Any], known: Sequence[Node]) -> Iterator[ast.expr]:
    """The conditions, of those nodes that are ``there``, which have to hold for a node to be run."""
    for node in there:
        if isinstance(node, (ast.If, ast.IfExp, ast.While)) and node not in known and is_in(at, node):
            orelse = node.orelse if isinstance(node.orelse, list) else [node.orelse]
            if any(is_in(at, part) for part in orelse):
                yield _negated(node.test)
            elif not is_in(at, node.test):
                yield node.test


def _negated(test: ast.expr) -> ast.expr:
    is_not = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    return test.operand if is_not else ast.UnaryOp(ast.Not(), test)  # type: ignore[attr-defined]


def _leaves(statement: ast.AST, kinds: tuple[type[ast.AST], ...] = _LEAVING) -> bool:
    """Whether a statement may leave the block that it is in, other than by an error."""
    if isinstance(statement, _DEFINITIONS):
        return False
    inner = (ast.Return,) if isinstance(statement, (ast.For, ast.While)) else kinds
    return isinstance(statement, kinds) or any(_leaves(each, inner) for block in blocks_of(statement) for each in block)


def _is_left_out(block: list[Any], owner: Any) -> bool:
    """Whether a block of a statement that is no ``if`` may not be run: a handler, an ``else``, a loop over nothing."""
    if isinstance(owner, ast.For) and not getattr(owner.iter, "elts", [owner.iter]):
        return True
    return block is not getattr(owner, "body", None) and not isinstance(owner, ast.If)


def _require_set_above(place: Definition, statement: Any, around: Sequence[Slot]) -> None:
    """Raise `UnrecognizedError` where a statement reads a variable that its function sets below it, and not above."""
    function = next((slot.node for slot in around if isinstance(slot.node, ast.FunctionDef)), None)
    if function is None:
        return
    _, lines_of = place.outline
    first_set = _cached(place, _first_set, function)
    end = extent(statement)[1]
    late = {name for name, where in first_set.items() if where >= end and is_among(lines_of[name], statement)}
    if not late:
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and node.id in late:
            raise unrecognized(f"{node.id} above line {statement.lineno}", place, "it below")


def _cached(place: Definition, find: Callable[[Any], Any], node: ast.AST) -> Any:
    """What ``find`` says of a node; asked once."""
    cache = place.module.cache
    if (find, node) not in cache:
        cache[find, node] = find(node)
    return cache[find, node]


def _first_set(function: ast.FunctionDef) -> dict[str, tuple[int, int]]:
    """The line and column at which each variable in a function is set first; 0, 0 for a parameter."""
    found: dict[str, tuple[int, int]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            found[node.arg] = (0, 0)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found[node.id] = min(extent(node)[0], found.get(node.id, extent(node)[0]))
    return found


def _changed(statement: ast.AST) -> Iterator[Any]:
    """What a statement sets or deletes, or calls a method of, as in ``x.clear()`` or ``n = x.pop()``.

    An assignment like ``x = f(x)`` does not count as setting ``x``, and variables of comprehensions do not count.
    """
    statement = without_annotation(statement)
    if isinstance(statement, _DEFINITIONS):
        return
    kept = set(map(ast.unparse, ast.walk(statement.value))) if isinstance(statement, ast.Assign) else set()
    yield from (part for part in targets_in(statement) if ast.unparse(part) not in kept)
    for part in ast.walk(statement):
        value = getattr(part, "value", None)
        if isinstance(part, ast.stmt) and isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            yield value.func.value


def _texts_of_changed(statement: ast.AST) -> set[str]:
    return set(map(ast.unparse, _changed(statement)))


def _with_containers(part: Any) -> Iterator[str]:
    """The text of ``a.b[0][1]``, of ``a.b[0]`` and of ``a.b``."""
    yield ast.unparse(part)
    if isinstance(part, ast.Subscript):
        yield from _with_containers(part.value)
