"""Patterns of Python code, matched by syntax. Layout and comments do not matter.

A pattern is code with the placeholders ``ANY``, ``ANY_NAME`` and ``...``, which docs/maintainers/adding-a-fix.md
describes. In addition, the keywords of a call match in any order, and so do the parameters of a ``def`` with ``...``. A
``def`` without decorators, return type or annotations matches functions with any of these. If a pattern matches in two
ways, there are two matches.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple

_NO_SYNTAX = ("ctx", "kind", "type_comment")
_GAP = ast.Constant(...)

Bindings = Mapping[Any, Any]
"""The source nodes matched by the parts of a pattern: by each ``ANY_NAME``, and by each ``located`` node (`Pattern`).

``...`` is bound to the first node in the gap, or to the next node if the gap is empty.
"""


class Match(NamedTuple):
    """One match: the matched expression or statements, and the bindings."""

    nodes: list[Any]
    bound: Bindings


class Pattern:
    """A pattern of statements or of one expression. A match also binds the ``located`` nodes, where edits start or end.

    ``reached`` is the last line of the pattern that `match` has compared. Every line above it matched somewhere.
    """

    def __init__(self, text: str, body: Sequence[ast.stmt], located: frozenset[Any] = frozenset()) -> None:
        self._lines, self._located, self.reached = text.splitlines(), located, 1
        is_expression = len(body) == 1 and isinstance(body[0], ast.Expr)
        self.nodes: list[Any] = [body[0].value] if is_expression else [*body]  # type: ignore[attr-defined]

    def __str__(self) -> str:
        return self._lines[0].strip()

    @property
    def line_reached(self) -> str:
        return self._lines[self.reached - 1].strip()

    def match(self, siblings: list[Any], number: int) -> Iterator[Match]:
        """Yield each match that begins at ``siblings[number]``."""
        for bindings, rest in self._match_sequence(self.nodes, siblings[number:], {}):
            yield Match(siblings[number : len(siblings) - len(rest)], bindings)

    def _match_sequence(
        self, wanted: list[Any], nodes: list[Any], bindings: Bindings
    ) -> Iterator[tuple[Bindings, list[Any]]]:
        """Match ``wanted`` with the first of ``nodes``. Yield the bindings of each match, and the nodes left over."""
        if not wanted:
            yield bindings, nodes
            return
        first, *rest = wanted
        if is_gap(first):
            if first in self._located:
                bindings = {**bindings, first: nodes[0]}
            for length in range(len(nodes) + 1):
                yield from self._match_sequence(rest, nodes[length:], bindings)
        elif nodes:
            if isinstance(first, ast.stmt):
                self.reached = max(self.reached, first.lineno)
            for bound in self._match(first, nodes[0], bindings):
                yield from self._match_sequence(rest, nodes[1:], bound)

    def _match(self, wanted: Any, node: Any, bindings: Bindings) -> list[Bindings]:
        """Return the bindings of each match of ``wanted`` with ``node``, added to the earlier ``bindings``, or []."""
        if isinstance(wanted, list) and isinstance(node, list):
            return [bound for bound, rest in self._match_sequence(wanted, node, bindings) if not rest]
        if is_any(wanted):
            ways = _match_any(wanted.id, node, bindings)
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
        if not any(map(is_gap, wanted.args)) and len(node.keywords) != len(wanted.keywords):
            return []
        ours, theirs = ({keyword.arg: keyword for keyword in call.keywords} for call in (wanted, node))
        return self._match_named(ours, theirs, ways)

    def _match_named(self, wanted: Mapping[Any, Any], given: Mapping[Any, Any], ways: list[Bindings]) -> list[Bindings]:
        """Return the bindings of each way in which every wanted part matches the given part of the same name."""
        for name, part in wanted.items():
            ways = [bound for way in ways for bound in self._match(part, given.get(name), way)]
        return ways


def as_python(text: str) -> str:
    """Return ``text`` as valid Python: ``*ANY`` and ``**ANY`` replace ``...`` among the parameters of a ``def``."""

    def with_stars(head: re.Match[str]) -> str:
        return head.group().replace("...", "*ANY", 1).replace("...", "**ANY")

    return re.sub(r"\bdef \w+\([^)]*\)", with_stars, text)


def is_gap(node: Any) -> bool:
    """Return whether a part of a pattern is ``...``, in any of its forms."""
    match node:
        case ast.Expr(value=part) | ast.withitem(context_expr=part):
            return is_gap(part)
        case ast.Constant(value=value):
            return value is ...
        case ast.Starred(value=ast.Name(id="ANY")):
            return True
    return False


def is_any(node: Any) -> bool:
    """Return whether a part of a pattern is ``ANY`` or ``ANY_NAME``."""
    return isinstance(node, ast.Name) and node.id.startswith("ANY")


def _match_any(name: str, node: Any, bindings: Bindings) -> list[Bindings]:
    if not isinstance(node, ast.expr) or isinstance(node, ast.Starred):
        return []
    if name == "ANY":
        return [bindings]
    if name not in bindings:
        return [{**bindings, name: node}]
    return [bindings] if ast.unparse(bindings[name]) == ast.unparse(node) else []


@cache
def _parts(wanted: Any) -> list[str]:
    """Return the names of those fields of a pattern's node that a match must compare."""
    ignored = [*_NO_SYNTAX]
    if isinstance(wanted, ast.Call):
        ignored.append("keywords")
    if isinstance(wanted, (ast.FunctionDef, ast.arg)):
        ignored += [part for part in ("decorator_list", "returns", "annotation") if not getattr(wanted, part, None)]
    return [part for part in wanted._fields if part not in ignored]


def _parameters(arguments: ast.arguments) -> dict[str, list[ast.AST]]:
    """Return each parameter by name, in a list with its default (``...`` if it has no default)."""
    by_place = zip_longest(reversed(arguments.args), reversed(arguments.defaults))
    by_name = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {parameter.arg: [parameter, default or _GAP] for parameter, default in (*by_place, *by_name)}
