"""Patterns: Python text that is looked for by its syntax, so that layout and comments do not matter.

In a pattern

- ``ANY`` is any expression, ``ANY_NAME`` too; where the same name comes again it is the same text;
- ``...`` is any number of statements, arguments, parameters, or items of a tuple or a ``with`` (``*ANY`` where Python
  wants a target);
- the keywords of a call are in any order; where ``...`` is last there are any others, as for parameters of a ``def``;
- a ``def`` without decorators, result or annotations has any of them.

Statements of a pattern are adjacent, and a block in it is whole; whatever else may stand there is ``...``. A pattern
that fits in two ways is found twice.
"""

from __future__ import annotations

import ast
import copy
import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeAlias

Position: TypeAlias = "tuple[int, int]"
Bindings: TypeAlias = "dict[Any, Any]"

BLOCKS = ("body", "handlers", "orelse", "finalbody")
_NO_SYNTAX = {"ctx", "kind", "type_comment"}


class Match(NamedTuple):
    """The expression or the statements that a pattern matched, and what is ``bound``.

    By name that is what stands where the pattern has ``ANY_NAME``, by a ``located`` node of the pattern the node that
    it matched.
    """

    nodes: list[Any]
    bound: Bindings


class Pattern:
    """What is looked for: statements, or an expression that stands alone. Matches say where ``located`` nodes are."""

    def __init__(self, text: str, body: Sequence[ast.stmt], located: frozenset[Any] = frozenset()) -> None:
        self._text, self._located = " ".join(text.split()), located
        is_expression = len(body) == 1 and isinstance(body[0], ast.Expr)
        self.nodes: list[Any] = [body[0].value] if is_expression else [*body]  # type: ignore[attr-defined]

    @classmethod
    @cache
    def of(cls, text: str) -> Pattern:
        text = textwrap.dedent(text)
        return cls(text, ast.parse(as_python(text)).body)

    @property
    def kinds(self) -> tuple[type[ast.AST], ...]:
        """The types of nodes that it may begin with."""
        kind = type(self.nodes[0])
        return (ast.Assign, ast.AnnAssign) if kind is ast.Assign else (kind,)

    @cached_property
    def first_name(self) -> str:
        """The name with which each match begins; "" where that may be any, or none."""
        name = first_name(self.nodes[0])
        return "" if name.startswith("ANY") else name

    def __str__(self) -> str:
        return self._text

    def beginning(self, heads: Sequence[Any]) -> tuple[int, Any, Any]:
        """How much of the pattern's beginning these heads of statements match: how many, and the two that differ."""
        matched = reached = 0
        is_adjacent = True
        wanted = [*heads_of(self.nodes)]
        for head in wanted:
            if is_gap(head):
                is_adjacent = False
                continue
            bare = _without_blocks(head)
            candidates = range(reached, len(heads))[: 1 if is_adjacent else None]
            following = next((i for i in candidates if self._match(bare, _without_blocks(heads[i]), {})), None)
            if following is None:
                return matched, head, heads[reached] if reached < len(heads) else None
            matched, reached, is_adjacent = matched + 1, following + 1, True
        return matched, None, heads[reached] if reached < len(heads) else None

    def match(self, siblings: list[Any], number: int) -> Iterator[Match]:
        """Each way in which the pattern fits where a node stands."""
        for bindings, rest in self._match_sequence(self.nodes, siblings[number:], {}):
            yield Match(siblings[number : len(siblings) - len(rest)], bindings)

    def _match_sequence(
        self, wanted: list[Any], nodes: list[Any], bindings: Bindings
    ) -> Iterator[tuple[Bindings, list[Any]]]:
        """Each way in which ``nodes`` can begin with the nodes ``wanted``: what is bound then, and what is left."""
        if not wanted:
            yield bindings, nodes
            return
        first, *rest = wanted
        if is_gap(first):
            if first in self._located:
                if not nodes:
                    return
                bindings = {**bindings, first: nodes[0]}
            for length in range(len(nodes) + 1):
                yield from self._match_sequence(rest, nodes[length:], bindings)
        elif nodes:
            for bound in self._match(first, nodes[0], bindings):
                yield from self._match_sequence(rest, nodes[1:], bound)

    def _match(self, wanted: Any, node: Any, bindings: Bindings) -> list[Bindings]:
        """Each way in which ``node`` matches, as what was bound before and by it."""
        if isinstance(wanted, list) and isinstance(node, list):
            return [bound for bound, rest in self._match_sequence(wanted, node, bindings) if not rest]
        if is_any(wanted):
            ways = _match_any(wanted.id, node, bindings)
        elif isinstance(wanted, ast.Assign) and isinstance(node, ast.AnnAssign):
            ways = self._match_parts(wanted, without_annotation(node), bindings)
        elif type(wanted) is not type(node):
            return []
        elif isinstance(wanted, ast.AST):
            ways = self._match_parts(wanted, node, bindings)
        else:
            return [bindings] if wanted == node else []
        if wanted in self._located:
            return [{**bound, wanted: node} for bound in ways]
        return ways

    def _match_parts(self, wanted: Any, node: Any, bindings: Bindings) -> list[Bindings]:
        ignored = _ignored_parts(wanted)
        ways = [bindings]
        for part in wanted._fields:
            if ways and part not in _NO_SYNTAX and part not in ignored:
                ours, theirs = getattr(wanted, part, None), getattr(node, part, None)
                ways = [bound for known in ways for bound in self._match(ours, theirs, known)]
        if isinstance(wanted, ast.Call):
            return [bound for known in ways for bound in self._match_keywords(wanted, node, known)]
        if ignored and isinstance(wanted, ast.arguments):
            return self._match_parameters(wanted, node, bindings)
        return ways

    def _match_keywords(self, wanted: ast.Call, node: ast.Call, bindings: Bindings) -> list[Bindings]:
        """Each way in which the keywords match, in any order; of a call that has ``...``, those that are named."""
        given = {keyword.arg: keyword for keyword in node.keywords}
        is_open = bool(wanted.args) and is_gap(wanted.args[-1])
        if not is_open and len(node.keywords) != len(wanted.keywords):
            return []
        ways = [bindings]
        for keyword in wanted.keywords:
            ways = [bound for known in ways for bound in self._match(keyword, given.get(keyword.arg), known)]
        return ways

    def _match_parameters(self, wanted: ast.arguments, node: ast.arguments, bindings: Bindings) -> list[Bindings]:
        """Each way in which parameters match that have ``...``, with the defaults of those that are named."""
        ours, theirs = _defaults(wanted), _defaults(node)
        ours.pop("ANY", None)
        return [
            bound
            for known, rest in self._match_sequence(wanted.args, node.args + node.kwonlyargs, bindings)
            if not rest
            for bound in self._match([*ours.values()], [theirs.get(name) for name in ours], known)
        ]


def heads_of(body: Sequence[Any]) -> Iterator[Any]:
    """Statements and those in their blocks, in order."""
    for node in body:
        yield node
        for block in blocks_of(node):
            yield from heads_of(getattr(node, block))


def _without_blocks(statement: Any) -> Any:
    """A statement without its blocks; an expression as it is."""
    bare = copy.copy(statement)
    for block in blocks_of(statement):
        setattr(bare, block, [])
    return bare


def blocks_of(node: Any) -> list[str]:
    """The names of the blocks of a statement or handler; parts of an expression may be called so, and are none."""
    return [] if isinstance(node, ast.expr) else [block for block in BLOCKS if hasattr(node, block)]


def in_short(head: Any) -> str:
    """The first line of a statement, or an expression."""
    return ast.unparse(_without_blocks(head)).partition("\n")[0]


def as_python(text: str) -> str:
    """The text of a pattern with ``...`` replaced where Python does not take it."""
    return re.sub(r"\bdef \w+\([^)]*\)", _name_parameters, text)


def _name_parameters(head: re.Match[str]) -> str:
    """The head of a function with ``ANY`` for ``...``."""
    before, *others = head.group().split("...")
    for text in others:
        before += ("ANY=0" if "=" in before else "ANY") + text
    return before


def is_gap(node: Any) -> bool:
    """Whether a part of a pattern stands for any number of statements, arguments, parameters or contexts."""
    match node:
        case ast.Expr(value=part) | ast.withitem(context_expr=part):
            return is_gap(part)
        case ast.Constant(value=value):
            return value is ...
        case ast.Starred(value=ast.Name(id="ANY")) | ast.arg(arg="ANY"):
            return True
    return False


def is_any(node: Any) -> bool:
    """Whether a part of a pattern stands for any expression."""
    return isinstance(node, ast.Name) and node.id.startswith("ANY")


def is_placed(node: Any) -> bool:
    """Whether a node has a position."""
    return isinstance(node, ast.withitem) or hasattr(node, "lineno")


def _match_any(name: str, node: Any, bindings: Bindings) -> list[Bindings]:
    if not isinstance(node, ast.expr) or isinstance(node, ast.Starred):
        return []
    if name == "ANY":
        return [bindings]
    known = bindings.get(name, node)
    is_same = known is node or ast.unparse(known) == ast.unparse(node)
    return [{name: node, **bindings}] if is_same else []


def without_annotation(node: Any) -> Any:
    """The node itself; of a variable that is set and annotated, the same without the annotation."""
    if isinstance(node, ast.AnnAssign) and node.value:
        return ast.copy_location(ast.Assign([node.target], node.value), node)
    return node


def _ignored_parts(wanted: Any) -> Sequence[str]:
    """The parts of a node that need not be the same."""
    if isinstance(wanted, ast.Call):
        return ("keywords",)
    if isinstance(wanted, ast.FunctionDef):
        return [part for part in ("decorator_list", "returns") if not getattr(wanted, part)]
    if isinstance(wanted, ast.arguments) and any(map(is_gap, wanted.args)):
        return wanted._fields
    return ("annotation",) if isinstance(wanted, ast.arg) and wanted.annotation is None else ()


def _defaults(arguments: ast.arguments) -> dict[str, ast.expr | None]:
    by_place = zip(reversed(arguments.args), reversed(arguments.defaults), strict=False)
    by_name = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {parameter.arg: default for parameter, default in (*by_place, *by_name)}


def extent(node: Any) -> tuple[Position, Position]:
    """Where a node starts and ends: lines, and columns in bytes. A part of a ``with`` has no position of its own."""
    first, last = getattr(node, "context_expr", node), getattr(node, "optional_vars", None) or node
    last = getattr(last, "context_expr", last)
    return (first.lineno, first.col_offset), (last.end_lineno, last.end_col_offset)


class Slot(NamedTuple):
    """A node as the list that it is in, and its number there."""

    siblings: list[Any]
    number: int

    @property
    def node(self) -> Any:
        return self.siblings[self.number]


def slots_in(root: ast.AST) -> list[Slot]:
    """A node and all that is in it."""
    slots = [Slot([root], 0)]
    for slot in slots:
        for _, value in ast.iter_fields(slot.node):
            siblings = value if isinstance(value, list) else [value]
            for number, node in enumerate(siblings):
                if isinstance(node, ast.AST) and node._fields:
                    slots.append(Slot(siblings, number))
    return slots


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
