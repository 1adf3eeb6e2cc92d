"""Compute the edits of a hunk from its two sides.

`compare` compares *rows*. A row is one logical line of Python, on one or more lines of text::

     with a:
    -    x = f(u, v)
    +    x = f(u, w, v)
    +    y = x
     z = 1

The first and the last row are context. One row becomes two, so whole lines replace whole lines
(`_Comparison._replace_lines`). Without ``y = x``, one row becomes one row, and only a part of it changes
(`_Comparison._replace_part`). Both rows begin with ``x = f(u,`` and end with ``v)``. So ``w, `` is inserted at the
start of the node ``v`` (`_Comparison._insertion_spot`).

Each replacement starts and ends at a node of the pattern. A match binds these nodes to nodes of the source.
"""

from __future__ import annotations

import ast
import io
import keyword
import re
import textwrap
import tokenize
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain, groupby, takewhile
from operator import eq
from typing import Any, NamedTuple

from .matching import Match, as_python, is_gap
from .source import Definition, Edit, ModuleSource, first_line, unrecognized

START, END = 0, 1
"""The edges of a node: indices of its span."""
_STATEMENT = (ast.stmt, ast.excepthandler)
_NEAR = 100
"""The longest name of a callee, in characters."""
_COMPOUND = (ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Lambda, ast.NamedExpr, ast.Await)


class PatchError(ValueError):
    """A patch is malformed; the message names the line of its text."""


class Line(NamedTuple):
    """A line of a hunk. ``mark`` is a blank, ``-`` or ``+``; ``number`` counts the lines of the patch."""

    mark: str
    text: str
    number: int


class Token(NamedTuple):
    word: str
    start: int
    end: int


class Row(NamedTuple):
    """A logical line of Python: its tokens and lines, and the comments and blank lines ``above``."""

    tokens: list[Token]
    indent: int
    above: list[Line]
    lines: list[Line]

    @property
    def words(self) -> list[str]:
        return [token.word for token in self.tokens]

    @property
    def number(self) -> int:
        return (self.context or self.lines)[0].number

    @property
    def mark(self) -> str:
        """The mark of the row's lines, or a blank if any of them is context."""
        return min(line.mark for line in self.lines)

    @property
    def context(self) -> list[Line]:
        return [line for line in self.lines if line.mark == " "]


class Side:
    """One side of a hunk: the lines with one of the ``marks``. The old side is the pattern, the new side the result."""

    def __init__(self, lines: Sequence[Line], marks: str, name: str) -> None:
        self.lines = [line for line in lines if line.mark in marks]
        self.module = ModuleSource(name, name, as_python("\n".join(line.text for line in self.lines)))
        try:
            self.body = ast.parse(self.module.text).body
        except SyntaxError as error:
            number = self.lines[min(error.lineno or 1, len(self.lines)) - 1].number
            raise PatchError(f"line {number}: {name} is no Python: {error.msg}") from error
        self.rows = [*self._rows()]

    def _rows(self) -> Iterator[Row]:
        read: list[tokenize.TokenInfo] = []
        done = 0
        for token in tokenize.generate_tokens(io.StringIO(self.module.text).readline):
            if token.type == tokenize.NEWLINE:
                (first, indent), (last, _) = read[0].start, read[-1].end
                tokens = [Token(part.string, self._offset(part.start), self._offset(part.end)) for part in read]
                yield Row(tokens, indent, self.lines[done : first - 1], self.lines[first - 1 : last])
                read, done = [], last
            elif token.string.strip() and token.type != tokenize.COMMENT:
                read.append(token)

    def _offset(self, position: tuple[int, int]) -> int:
        return self.module.starts[position[0]] + position[1]

    @cached_property
    def nodes(self) -> list[tuple[Any, tuple[int, int]]]:
        """The nodes with a position, outer ones first, each with its span. The span includes parentheses."""
        nodes: list[Any] = [*self.body]
        for node in nodes:
            if not is_gap(node) and not isinstance(node, ast.JoinedStr):  # in Python 3.10, its parts have no position
                nodes += ast.iter_child_nodes(node)
        placed = [node for node in nodes if hasattr(node, "lineno") or isinstance(node, ast.withitem)]
        return [(node, span_with_parentheses(self.module, node)) for node in placed]

    def added(self, rows: Sequence[Row]) -> str:
        """Return the text of new rows, with the added comments above and the added blank lines around them."""
        lines = [line for row in rows for line in (*row.above, *row.lines)]
        below = self.lines[self.lines.index(lines[-1]) + 1 :]
        lines += takewhile(lambda line: line.mark == "+" and not line.text.strip(), below)
        return textwrap.dedent("\n".join(line.text for line in lines if line.mark == "+")) + "\n"


class Spot(NamedTuple):
    """The start or the end of a node of the pattern. A ``...`` starts with the first node in the gap."""

    node: Any
    edge: int


class Replacement(NamedTuple):
    """Replace everything between two spots with ``text``, as ``whole_lines`` or within a line."""

    start: Spot
    end: Spot
    text: str
    whole_lines: bool

    def edit(self, definition: Definition, match: Match) -> Edit:
        """Return the edit of the source at a match."""
        edit_of = self._edit_of_lines if self.whole_lines else self._edit_within_line
        nodes = match.bound.nodes
        return edit_of(definition, match, nodes[self.start.node], nodes[self.end.node])

    def _edit_within_line(self, definition: Definition, match: Match, first: Any, last: Any) -> Edit:
        module = definition.module
        start = span_with_parentheses(module, first)[self.start.edge]
        end = span_with_parentheses(module, last)[self.end.edge]
        text = self.text.replace("\n", "\n" + _indent_at(module.text, start))
        return Edit(module.name, start, end, _filled(definition, match, text))

    def _edit_of_lines(self, definition: Definition, match: Match, first: Any, last: Any) -> Edit:
        module = definition.module
        start, end = lines_of(definition, first)[self.start.edge], lines_of(definition, last)[self.end.edge]
        if self.start != self.end and self.end.edge == START:  # comments belong to the block below them
            end = _start_of_comments(module, last)
        if not self.text:
            start = _start_of_comments(module, first)
        return Edit(module.name, start, end, _filled(definition, match, indented(module, first, self.text)))


def compare(old: Side, new: Side) -> list[Replacement]:
    """Return the replacements to turn ``old`` into ``new``; raises `PatchError`."""
    changes = [*_Comparison(old, new).changes()]
    for line in new.lines:
        is_comment = line.mark == "+" and line.text.strip().startswith("#")
        if is_comment and not any(line.text.strip() in change.text for change in changes):
            raise PatchError(f"line {line.number}: put the comment above a new statement")
    return changes


class _Comparison:
    def __init__(self, old: Side, new: Side) -> None:
        self._old, self._new = old, new
        self._is_expression = len(old.body) == len(new.body) == 1 and isinstance(new.body[0], ast.Expr)

    def changes(self) -> Iterator[Replacement]:
        """Yield the changes in order. ``+`` rows replace the ``-`` rows above; a context row can change in part."""
        context = [row for row in self._new.rows if row.context]
        if [row.context for row in self._old.rows if row.context] != [row.context for row in context]:
            raise _error(self._old.rows, "a context line is a whole line of code on one side only")
        rows = [*self._old.rows, *(row for row in self._new.rows if not row.context)]
        runs = groupby(sorted(rows, key=lambda row: row.number), key=lambda row: row.mark)
        removed: list[Row] = []
        for mark, run in chain(runs, [(" ", ())]):
            rows = [*run]
            if mark == "+" or (mark == " " and removed):
                yield from self._replace_rows(removed, rows if mark == "+" else [])
            removed = rows if mark == "-" else []
            for row in rows if mark == " " else ():
                yield from self._replace_part(row, context.pop(0))

    def _replace_rows(self, removed: list[Row], added: list[Row]) -> Iterator[Replacement]:
        """Replace rows one by one if they pair up, else all at once."""
        is_commented = any("#" in line.text for row in added for line in (*row.above, *row.lines))
        if [row.indent for row in removed] != [row.indent for row in added] or is_commented:
            yield self._replace_lines(removed, added)
            return
        for old, new in zip(removed, added, strict=True):
            yield from self._replace_part(old, new)

    def _replace_lines(self, removed: list[Row], added: list[Row]) -> Replacement:
        """Replace whole lines with whole lines, or insert them below the statement above."""
        indent = min(row.indent for row in (*removed, *added))
        number = (removed[-1] if removed else added[0]).number
        above = [row for row in self._old.rows if row.number <= number]
        below = self._old.rows[len(above) :]
        end = self._statement(END, above, indent)
        end = end or self._statement(START, below, below[0].indent if below and removed else indent)
        start = self._statement(START, removed, indent) if removed else end
        is_of_one_block = all(rows[0].indent == indent for rows in (removed, added) if rows)
        is_clause = added and added[0].words[0] in ("elif", "else", "except", "finally")
        if not start or not end or not is_of_one_block or is_clause:
            raise _error(added or removed, "no statement of the same block above or below")
        text = self._new.added(added) if added else ""
        return Replacement(start, end, _fillable(text, added) if removed else text, True)

    def _statement(self, edge: int, rows: list[Row], indent: int) -> Spot | None:
        """Find the statement with this indent that starts the first row or ends the last row."""
        for node, span in self._old.nodes if rows else ():
            offset = rows[-1].tokens[-1].end if edge == END else rows[0].tokens[0].start
            if isinstance(node, _STATEMENT) and (span[edge], node.col_offset) == (offset, indent):
                if is_gap(node):
                    return Spot(node, edge) if edge == START else None
                return Spot(node.value if isinstance(node, ast.Expr) else node, edge)
        return None

    def _replace_part(self, old: Row, new: Row) -> Iterator[Replacement]:
        """Replace the smallest part of a row with all differences, else the whole row. Equal rows yield nothing."""
        if old.words == new.words:
            return
        same_before = _same_at_start(old.words, new.words)
        same_after = _same_at_start(old.words[same_before:][::-1], new.words[same_before:][::-1])
        is_insertion = same_before + same_after == len(old.words)
        if is_insertion and (spot := self._insertion_spot(old, new, same_before)):
            yield self._replacement(new, spot, spot, same_before, same_after)
        elif node := self._smallest_node(old, same_before, same_after):
            before, after = _tokens_outside(old, node[1])
            yield self._replacement(new, Spot(node[0], START), Spot(node[0], END), before, after)
        elif old.context:
            raise _error([new], "neither whole statements nor a part of an expression")
        else:
            yield self._replace_lines([old], [new])

    def _replacement(self, new: Row, start: Spot, end: Spot, before: int, after: int) -> Replacement:
        """Replace the text between two spots with the new row, without its first and last tokens."""
        stop = len(new.tokens) - after
        first = new.tokens[before].start if start.edge == START else new.tokens[before - 1].end
        last = new.tokens[stop].start if end.edge == START else new.tokens[stop - 1].end
        text = self._new.module.text
        text = text[first:last].replace("\n" + _indent_at(text, first), "\n")
        return Replacement(start, end, _fillable(text, [new]), False)

    def _smallest_node(self, row: Row, same_before: int, same_after: int) -> tuple[Any, tuple[int, int]] | None:
        """Find the smallest expression around the different tokens, with its span.

        Return None if it is a statement or the whole row.
        """
        stop = len(row.tokens) - same_after
        different = row.tokens[same_before:stop] or row.tokens[max(same_before - 1, 0) : stop + 1]
        start, end = different[0].start, different[-1].end
        around = [(node, span) for node, span in self._old.nodes if span[START] <= start and end <= span[END]]
        if not around:
            return None
        node, span = around[-1]
        is_whole_row = _tokens_outside(row, span) == (0, 0) and not self._is_expression
        return None if is_whole_row or isinstance(node, _STATEMENT) else (node, span)

    def _insertion_spot(self, old: Row, new: Row, index: int) -> Spot | None:
        """Find the edge of a node at which to insert text, in front of token ``index``.

        The node must exist on both sides. From ``a or b`` to ``a or b and c`` the spot is the end of ``b``, because the
        new side has no node ``a or b``. Return None next to ``ANY``: an operator could bind to a part of the matched
        expression.
        """
        neighbors = old.tokens[max(index - 1, 0) : index + 1]
        if any(token.word.startswith("ANY") for token in neighbors):
            return None
        ends_at = old.tokens[index - 1].end if index else None
        starts_at = old.tokens[index].start if index < len(old.tokens) else None
        spots = []
        for node, (start, end) in self._nodes_on_both_sides(old, new, index):
            if start == starts_at:
                spots.append(Spot(node, START))
            if end == ends_at and not is_gap(node):
                spots.append(Spot(node, END))
        # Outer nodes come first, so the text is inserted outside the parentheses of inner nodes.
        return min(spots, key=lambda spot: (is_gap(spot.node), spot.edge), default=None)

    def _nodes_on_both_sides(self, old: Row, new: Row, index: int) -> Iterator[tuple[Any, tuple[int, int]]]:
        """Yield the expressions and gaps unchanged by an insertion in front of token ``index``, with their spans."""
        inserted = len(new.tokens) - len(old.tokens)
        unchanged = [*new.tokens[:index], *new.tokens[index + inserted :]]
        new_starts = {token.start: other.start for token, other in zip(old.tokens, unchanged, strict=True)}
        new_ends = {token.end: other.end for token, other in zip(old.tokens, unchanged, strict=True)}
        new_spans = {span for _, span in self._new.nodes}
        for node, (start, end) in self._old.nodes:
            is_statement = isinstance(node, _STATEMENT) and not is_gap(node)
            if (new_starts.get(start), new_ends.get(end)) in new_spans and not is_statement:
                yield node, (start, end)


def _same_at_start(words: Sequence[str], others: Sequence[str]) -> int:
    """Count the equal tokens at the start."""
    return len([*takewhile(bool, map(eq, words, others))])


def _tokens_outside(row: Row, span: tuple[int, int]) -> tuple[int, int]:
    """Count the tokens of a row before and after a span."""
    before = sum(token.start < span[START] for token in row.tokens)
    after = sum(token.end > span[END] for token in row.tokens)
    return before, after


def _fillable(text: str, rows: Sequence[Row]) -> str:
    """Return the text. Raise `PatchError` if it contains ``...`` or ``ANY``, which have no known text."""
    if re.search(r"\.\.\.|\bANY\b", text):
        raise _error(rows, "neither whole statements nor a part of an expression")
    return text


def _error(rows: Sequence[Row], text: str) -> PatchError:
    return PatchError(f"line {rows[0].number}: {text}")


def span_with_parentheses(module: ModuleSource, node: Any) -> tuple[int, int]:
    """Return the span of a node, including the parentheses around it but not a call's parentheses."""
    text, (start, end) = module.text, module.span(node)
    while text[:start].rstrip()[-1:] == "(" and text[end:].lstrip()[:1] == ")":
        opening = text.rindex("(", 0, start)
        callee = re.search(r"(\w+|[)\]]) *\Z", text[max(opening - _NEAR, 0) : opening])
        if callee and not keyword.iskeyword(callee[1]):
            break
        start, end = opening, text.index(")", end) + 1
    return start, end


def _indent_at(text: str, offset: int) -> str:
    """Return the indent of the line around a character."""
    line = text[text.rfind("\n", 0, offset) + 1 :]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _filled(definition: Definition, match: Match, text: str) -> str:
    """Replace each ``ANY_NAME`` with its matched text, in parentheses if operator precedence requires them."""

    def fill(name: re.Match[str]) -> str:
        node = match.bound.names[name.group()]
        return f"({definition.text(node)})" if isinstance(node, _COMPOUND) else definition.text(node)

    return re.sub(r"\bANY_\w+", fill, text)


def lines_of(definition: Definition, statement: Any) -> tuple[int, int]:
    """Return the start and end of a statement's lines; raises `UnrecognizedError` if they contain other statements."""
    module, number = definition.module, first_line(statement)
    start, end = module.starts[number], module.starts[statement.end_lineno + 1]
    before, after = module.line(number)[: statement.col_offset], module.text[module.span(statement)[END] : end]
    if before.strip() or after.partition("#")[0].strip():
        raise unrecognized("a statement on lines of its own", definition, f"`{module.text[start:end].strip()}`")
    return start, end


def indented(module: ModuleSource, statement: Any, text: str) -> str:
    """Indent lines like a statement."""
    return textwrap.indent(text, _indent_at(module.text, module.starts[statement.lineno]))


def _start_of_comments(module: ModuleSource, statement: Any) -> int:
    """Return the start of the comments directly above a statement, or else of its first line."""
    number = first_line(statement)
    while module.line(number - 1).strip().startswith("#"):
        number -= 1
    return module.starts[number]
