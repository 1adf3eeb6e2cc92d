"""Patterns: Python text that is looked for by its syntax, so that layout and comments do not matter.

In a pattern

- ``ANY`` is any expression, ``ANY_NAME`` too; where the same name comes again it is the same text;
- ``...`` is any number of statements, arguments, or items of a tuple or a ``with`` (``*ANY`` where Python wants a
  target);
- the keywords of a call are in any order; where ``...`` is last there are any others;
- a ``def`` with ``...`` has these parameters, with these defaults, in any order and among any others;
- a ``def`` without decorators, result or annotations has any of them.

Statements of a pattern are adjacent, and a block in it is whole; whatever else may stand there is ``...``. A pattern
that fits in two ways is found twice.
"""

from __future__ import annotations

import ast
import copy
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

Position: TypeAlias = "tuple[int, int]"
Bindings: TypeAlias = "dict[Any, Any]"

BLOCKS = ("body", "handlers", "orelse", "finalbody")
_NO_SYNTAX = ("ctx", "kind", "type_comment")
_GAP = ast.Constant(...)


class Match(NamedTuple):
    """The expression or the statements that a pattern matched, and what is ``bound``.

    By name that is what stands where the pattern has ``ANY_NAME``, by a ``located`` node of the pattern the node that
    it matched; by a ``...`` the first node that this stands for, or else the next one.
    """

    nodes: list[Any]
    bound: Bindings


class Pattern:
    """What is looked for: statements, or an expression that stands alone. Matches say where ``located`` nodes are."""

    def __init__(self, text: str, body: Sequence[ast.stmt], located: frozenset[Any] = frozenset()) -> None:
        self._text, self._located = " ".join(text.split()), located
        is_expression = len(body) == 1 and isinstance(body[0], ast.Expr)
        self.nodes: list[Any] = [body[0].value] if is_expression else [*body]  # type: ignore[attr-defined]

    @staticmethod
    @cache
    def of(text: str) -> Pattern:
        text = textwrap.dedent(text)
        return Pattern(text, ast.parse(as_python(text)).body)

    @property
    def kinds(self) -> list[type]:
        """The types of nodes that it may begin with."""
        kind = type(self.nodes[0])
        return [ast.Assign, ast.AnnAssign] if kind is ast.Assign else [kind]

    def __str__(self) -> str:
        return self._text

    def beginning(self, heads: Sequence[Any]) -> tuple[int, Any, Any]:
        """How many heads of this pattern the first of ``heads`` match, and the two that differ then, or None."""
        count = position = 0
        is_adjacent = True
        for head in heads_of(self.nodes):
            if is_gap(head):
                is_adjacent = False
                continue
            candidates = heads[position : position + 1] if is_adjacent else heads[position:]
            bare = without_blocks(head)
            is_match = [bool(self._match(bare, without_blocks(other), {})) for other in candidates]
            if True not in is_match:
                return count, head, next(iter(heads[position:]), None)
            count, position, is_adjacent = count + 1, position + is_match.index(True) + 1, True
        return count, None, next(iter(heads[position:]), None)

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
            ways = self._match_parts(wanted, ast.Assign([node.target], node.value), bindings)  # type: ignore[arg-type]
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
        if isinstance(wanted, ast.arguments) and wanted.vararg and wanted.vararg.arg == "ANY":
            return self._match_named(_parameters(wanted), _parameters(node), [bindings])
        ways = [bindings]
        for part in _parts(wanted):
            ours, theirs = getattr(wanted, part, None), getattr(node, part, None)
            ways = [bound for way in ways for bound in self._match(ours, theirs, way)]
            if not ways:
                return []
        if not isinstance(wanted, ast.Call):
            return ways
        is_open = bool(wanted.args) and is_gap(wanted.args[-1])
        if not is_open and len(node.keywords) != len(wanted.keywords):
            return []
        ours, theirs = ({keyword.arg: keyword for keyword in call.keywords} for call in (wanted, node))
        return self._match_named(ours, theirs, ways)

    def _match_named(self, wanted: Mapping[Any, Any], given: Mapping[Any, Any], ways: list[Bindings]) -> list[Bindings]:
        """Each way in which all that is wanted is given, by name."""
        for name, part in wanted.items():
            ways = [bound for way in ways for bound in self._match(part, given.get(name), way)]
        return ways


def as_python(text: str) -> str:
    """The text of a pattern with ``...`` replaced where Python does not take it: among the parameters of a ``def``."""

    def with_stars(head: re.Match[str]) -> str:
        return head.group().replace("...", "*ANY", 1).replace("...", "**ANY")

    return re.sub(r"\bdef \w+\([^)]*\)", with_stars, text)


def heads_of(body: Sequence[Any]) -> Iterator[Any]:
    """Statements and those in their blocks, in order."""
    for node in body:
        yield node
        for block in blocks_of(node):
            yield from heads_of(getattr(node, block))


def without_blocks(statement: Any) -> Any:
    """A statement without its blocks; an expression as it is."""
    bare = copy.copy(statement)
    for block in blocks_of(statement):
        setattr(bare, block, [])
    return bare


def blocks_of(node: Any) -> list[str]:
    """The names of the blocks of a statement or handler; parts of an expression may be called so, and are none."""
    return [] if isinstance(node, ast.expr) else [block for block in BLOCKS if hasattr(node, block)]


def is_gap(node: Any) -> bool:
    """Whether a part of a pattern stands for any number of statements, arguments or items."""
    match node:
        case ast.Expr(value=part) | ast.withitem(context_expr=part):
            return is_gap(part)
        case ast.Constant(value=value):
            return value is ...
        case ast.Starred(value=ast.Name(id="ANY")):
            return True
    return False


def is_any(node: Any) -> bool:
    """Whether a part of a pattern stands for any expression."""
    return isinstance(node, ast.Name) and node.id.startswith("ANY")


def _match_any(name: str, node: Any, bindings: Bindings) -> list[Bindings]:
    if not isinstance(node, ast.expr) or isinstance(node, ast.Starred):
        return []
    if name == "ANY":
        return [bindings]
    bound = bindings.get(name, node)
    is_same = bound is node or ast.unparse(bound) == ast.unparse(node)
    return [{name: node, **bindings}] if is_same else []


@cache
def _parts(wanted: Any) -> list[str]:
    """The fields of a node that have to be the same."""
    ignored = [*_NO_SYNTAX]
    if isinstance(wanted, ast.Call):
        ignored.append("keywords")
    if isinstance(wanted, (ast.FunctionDef, ast.arg)):
        ignored += [part for part in ("decorator_list", "returns", "annotation") if not getattr(wanted, part, None)]
    return [part for part in wanted._fields if part not in ignored]


def _parameters(arguments: ast.arguments) -> dict[str, list[ast.AST]]:
    """Parameters by name, with their defaults, or ``...``."""
    by_place = zip_longest(reversed(arguments.args), reversed(arguments.defaults))
    by_name = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {parameter.arg: [parameter, default or _GAP] for parameter, default in (*by_place, *by_name)}


def extent(node: Any) -> tuple[Position, Position]:
    """Where a node starts and ends: lines, and columns in bytes. A part of a ``with`` has no position of its own."""
    first, last = getattr(node, "context_expr", node), getattr(node, "optional_vars", None) or node
    last = getattr(last, "context_expr", last)
    return (first.lineno, first.col_offset), (last.end_lineno, last.end_col_offset)
