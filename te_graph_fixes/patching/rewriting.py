"""From the two sides of a hunk to edits of the source.

`compare` goes through both sides by *rows*, which are lines of code, however many lines of text they are on::

     with a:
    -    x = f(u, v)
    +    x = f(u, w, v)
    +    y = x
     z = 1

The first row and the last stay. The rows between do not pair up, so that whole lines take the place of whole lines
(`_Comparison._in_lines`). Without ``y = x`` they would, and only a part of the row would change (`_within`): both begin
with ``x = f(u,`` and end with ``v)``, and ``w, `` is inserted where ``v`` starts (`_spot`).

A change starts and ends where nodes of the pattern do, and a match says where these are in the source.
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

from .definition import Definition, unrecognized
from .matching import Match, as_python, is_gap
from .source import Edit, ModuleSource, first_line

START, END = 0, 1
"""The edges of a node: indices of its span."""
_STATEMENT = (ast.stmt, ast.excepthandler)
_NEAR = 100
"""How many characters the name of a callee may have."""
_COMPOUND = (ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Lambda, ast.NamedExpr, ast.Await)


class PatchError(ValueError):
    """A patch that cannot be read; the message has the line of its text."""


class Line(NamedTuple):
    """A line of a hunk: ``mark`` is a blank, ``-`` or ``+``, ``number`` counts the lines of the patch."""

    mark: str
    text: str
    number: int


class Token(NamedTuple):
    word: str
    start: int
    end: int


class Row(NamedTuple):
    """A line of code: its tokens, and the lines of a hunk that it is on; ``above`` are comments and blank lines."""

    tokens: list[Token]
    indent: int
    above: list[Line]
    lines: list[Line]

    @property
    def words(self) -> list[str]:
        return [token.word for token in self.tokens]

    @property
    def number(self) -> int:
        return (self.kept or self.lines)[0].number

    @property
    def mark(self) -> str:
        """The mark of its lines, a blank where a part stays."""
        return min(line.mark for line in self.lines)

    @property
    def kept(self) -> list[Line]:
        return [line for line in self.lines if line.mark == " "]


class Side:
    """The lines of a hunk with one of the ``marks``: the pattern, or what becomes of it."""

    def __init__(self, lines: Sequence[Line], marks: str, what: str) -> None:
        self.lines = [line for line in lines if line.mark in marks]
        self.module = ModuleSource(what, what, as_python("\n".join(line.text for line in self.lines)))
        try:
            self.body = ast.parse(self.module.text).body
        except SyntaxError as error:
            number = self.lines[min(error.lineno or 1, len(self.lines)) - 1].number
            raise PatchError(f"line {number}: {what} is no Python: {error.msg}") from error
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

    def added(self, rows: Sequence[Row]) -> str:
        """The text of new rows, with the comments above and the blank lines around that are added with them."""
        lines = [line for row in rows for line in (*row.above, *row.lines)]
        below = self.lines[self.lines.index(lines[-1]) + 1 :]
        lines += takewhile(lambda line: line.mark == "+" and not line.text.strip(), below)
        return textwrap.dedent("\n".join(line.text for line in lines if line.mark == "+")) + "\n"


class Spot(NamedTuple):
    """Where a node of the pattern starts or ends; ``...`` starts with the first node that it stands for."""

    node: Any
    edge: int


class Replacement(NamedTuple):
    """Put ``text`` in the place of all between two spots, or at one: in ``whole_lines``, or within a line."""

    start: Spot
    end: Spot
    text: str
    whole_lines: bool

    def edit(self, definition: Definition, match: Match) -> Edit:
        module, first, last = definition.module, match.bound[self.start.node], match.bound[self.end.node]
        if not self.whole_lines:
            start = span_with_parentheses(module, first)[self.start.edge]
            end = span_with_parentheses(module, last)[self.end.edge]
            text = self.text.replace("\n", "\n" + _indent_at(module.text, start))
            return Edit(module.name, start, end, _filled(definition, match, text))
        start, end = lines_of(definition, first)[self.start.edge], lines_of(definition, last)[self.end.edge]
        if self.start != self.end and self.end.edge == START:  # comments stay with the block below them
            end = _start_of_comments(module, last)
        if not self.text:
            start = _start_of_comments(module, first)
        return Edit(module.name, start, end, _filled(definition, match, indented(module, first, self.text)))


def compare(old: Side, new: Side) -> list[Replacement]:
    """The changes that make ``new`` of ``old``; raises `PatchError`."""
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

    @cached_property
    def _nodes(self) -> list[tuple[Any, tuple[int, int]]]:
        return _nodes(self._old)

    @cached_property
    def _new_spans(self) -> set[tuple[int, int]]:
        return {ends for _, ends in _nodes(self._new)}

    def changes(self) -> Iterator[Replacement]:
        """The changes in order: ``-`` rows become the ``+`` rows after them, and one that stays may change in part."""
        kept = [row for row in self._new.rows if row.kept]
        if [row.kept for row in self._old.rows if row.kept] != [row.kept for row in kept]:
            raise _error(self._old.rows, "a line that stays is not of one line of code on both sides")
        rows = [*self._old.rows, *(row for row in self._new.rows if not row.kept)]
        runs = groupby(sorted(rows, key=lambda row: row.number), key=lambda row: row.mark)
        gone: list[Row] = []
        for mark, run in chain(runs, [(" ", ())]):
            rows = [*run]
            if mark == "+" or (mark == " " and gone):
                yield from self._replaced(gone, rows if mark == "+" else [])
            gone = rows if mark == "-" else []
            for row in rows if mark == " " else ():
                yield from self._within(row, kept.pop(0))

    def _replaced(self, gone: list[Row], made: list[Row]) -> Iterator[Replacement]:
        """The changes of rows that follow each other: one by one if they are alike, or else all at once."""
        is_commented = any("#" in line.text for row in made for line in (*row.above, *row.lines))
        if [row.indent for row in gone] != [row.indent for row in made] or is_commented:
            yield self._in_lines(gone, made)
            return
        for old, new in zip(gone, made, strict=True):
            yield from self._within(old, new)

    def _in_lines(self, gone: list[Row], made: list[Row]) -> Replacement:
        """Whole rows in the place of whole rows, or below the statement above them."""
        indent = min(row.indent for row in (*gone, *made))
        number = (gone[-1] if gone else made[0]).number
        above = [row for row in self._old.rows if row.number <= number]
        below = self._old.rows[len(above) :]
        end = self._statement(END, above, indent)
        end = end or self._statement(START, below, below[0].indent if below and gone else indent)
        start = self._statement(START, gone, indent) if gone else end
        is_of_one_block = all(rows[0].indent == indent for rows in (gone, made) if rows)
        is_clause = made and made[0].words[0] in ("elif", "else", "except", "finally")
        if not start or not end or not is_of_one_block or is_clause:
            raise _error(made or gone, "no statement of the same block above or below")
        text = self._new.added(made) if made else ""
        return Replacement(start, end, _fillable(text, made) if gone else text, True)

    def _statement(self, edge: int, rows: list[Row], indent: int) -> Spot | None:
        """Where a statement with this indent starts with the first of some rows, or ends with the last."""
        for node, ends in self._nodes if rows else ():
            offset = rows[-1].tokens[-1].end if edge == END else rows[0].tokens[0].start
            if isinstance(node, _STATEMENT) and (ends[edge], node.col_offset) == (offset, indent):
                if is_gap(node):
                    return Spot(node, edge) if edge == START else None
                return Spot(node.value if isinstance(node, ast.Expr) else node, edge)
        return None

    def _within(self, old: Row, new: Row) -> Iterator[Replacement]:
        """The change of the smallest part of a row that differs, or else of the row."""
        if old.words == new.words:
            return
        before = _in_common(old.words, new.words)
        after = _in_common(old.words[before:][::-1], new.words[before:][::-1])
        stop = len(old.words) - after
        if before == stop and (spot := self._spot(old, new, before)):
            left = right = spot
        elif part := self._part(old, before, stop):
            node, before, after = part
            left, right = Spot(node, START), Spot(node, END)
        elif old.kept:
            raise _error([new], "neither whole statements nor a part of an expression")
        else:
            yield self._in_lines([old], [new])
            return
        stop = len(new.words) - after
        first = new.tokens[before].start if left.edge == START else new.tokens[before - 1].end
        last = new.tokens[stop].start if right.edge == START else new.tokens[stop - 1].end
        text = self._new.module.text
        text = text[first:last].replace("\n" + _indent_at(text, first), "\n")
        yield Replacement(left, right, _fillable(text, [new]), False)

    def _part(self, row: Row, start: int, stop: int) -> tuple[Any, int, int] | None:
        """The smallest part of an expression around some tokens, and how many tokens of the row are before and after.

        None where that is a statement, or all of the row.
        """
        different = row.tokens[start:stop] or row.tokens[max(start - 1, 0) : stop + 1]
        first, last = different[0].start, different[-1].end
        around = [(node, ends) for node, ends in self._nodes if ends[START] <= first and last <= ends[END]]
        if not around:
            return None
        node, (first, last) = around[-1]
        before = sum(token.start < first for token in row.tokens)
        after = sum(token.end > last for token in row.tokens)
        is_whole_row = before == after == 0 and not self._is_expression
        return None if is_whole_row or isinstance(node, _STATEMENT) else (node, before, after)

    def _spot(self, old: Row, new: Row, index: int) -> Spot | None:
        """Where to insert text in front of a token: where a node starts, or ends, that is a node of the new side too.

        From ``a or b`` to ``a or b and c`` that is the end of ``b``. It is not that of ``a or b``, which the source may
        have in parentheses. None beside ``ANY``: an operator there could take a part of what that stands for.
        """
        beside = old.tokens[max(index - 1, 0) : index + 1]
        if any(token.word.startswith("ANY") for token in beside):
            return None
        end_before = old.tokens[index - 1].end if index else None
        start_after = old.tokens[index].start if index < len(old.tokens) else None
        kept = [*new.tokens[:index], *new.tokens[len(new.tokens) - len(old.tokens) + index :]]
        starts = {token.start: other.start for token, other in zip(old.tokens, kept, strict=True)}
        ends = {token.end: other.end for token, other in zip(old.tokens, kept, strict=True)}
        spots = []
        for node, (start, end) in self._nodes:  # outer ones first: text goes outside of the parentheses around them
            is_kept = (starts.get(start), ends.get(end)) in self._new_spans
            if not is_kept or (isinstance(node, _STATEMENT) and not is_gap(node)):
                continue
            if start == start_after:
                spots.append(Spot(node, START))
            if end == end_before and not is_gap(node):
                spots.append(Spot(node, END))
        return min(spots, key=lambda spot: (is_gap(spot.node), spot.edge), default=None)


def _nodes(side: Side) -> list[tuple[Any, tuple[int, int]]]:
    """The nodes that have a position, outer ones first, with the character offsets of their ends."""
    nodes: list[Any] = [*side.body]
    for node in nodes:
        if not is_gap(node) and not isinstance(node, ast.JoinedStr):  # Python 3.10 does not place parts of these
            nodes += ast.iter_child_nodes(node)
    placed = [node for node in nodes if hasattr(node, "lineno") or isinstance(node, ast.withitem)]
    return [(node, span_with_parentheses(side.module, node)) for node in placed]


def _in_common(words: Sequence[str], others: Sequence[str]) -> int:
    """How many tokens are the same at the beginning."""
    return len([*takewhile(bool, map(eq, words, others))])


def _fillable(text: str, rows: Sequence[Row]) -> str:
    """The text of some rows; raises `PatchError` if a part of it stands for any other, and cannot be put anywhere."""
    if re.search(r"\.\.\.|\bANY\b", text):
        raise _error(rows, "neither whole statements nor a part of an expression")
    return text


def _error(rows: Sequence[Row], text: str) -> PatchError:
    return PatchError(f"line {rows[0].number}: {text}")


def span_with_parentheses(module: ModuleSource, node: Any) -> tuple[int, int]:
    """Where a part of a statement starts and ends with the parentheses around it; those of a call are not."""
    text, (start, end) = module.text, module.span(node)
    while text[:start].rstrip()[-1:] == "(" and text[end:].lstrip()[:1] == ")":
        opening = text.rindex("(", 0, start)
        callee = re.search(r"(\w+|[)\]]) *\Z", text[max(opening - _NEAR, 0) : opening])
        if callee and not keyword.iskeyword(callee[1]):
            break
        start, end = opening, text.index(")", end) + 1
    return start, end


def _indent_at(text: str, offset: int) -> str:
    """The indent of the line at a character."""
    line = text[text.rfind("\n", 0, offset) + 1 :]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _filled(definition: Definition, match: Match, text: str) -> str:
    """The text with what ``ANY_NAME`` stands for, with parentheses where an operator could take a part of it."""

    def fill(name: re.Match[str]) -> str:
        node = match.bound[name.group()]
        return f"({definition.text(node)})" if isinstance(node, _COMPOUND) else definition.text(node)

    return re.sub(r"\bANY_\w+", fill, text)


def lines_of(definition: Definition, statement: Any) -> tuple[int, int]:
    """Where the lines of a statement start and end; raises `UnrecognizedError` if others stand on them too."""
    module, number = definition.module, first_line(statement)
    start, end = module.starts[number], module.starts[statement.end_lineno + 1]
    before, after = module.line(number)[: statement.col_offset], module.text[module.span(statement)[END] : end]
    if before.strip() or after.partition("#")[0].strip():
        raise unrecognized("a statement on lines of its own", definition, f"`{module.text[start:end].strip()}`")
    return start, end


def indented(module: ModuleSource, statement: Any, text: str) -> str:
    """Lines with the indent of a statement."""
    return textwrap.indent(text, _indent_at(module.text, module.starts[statement.lineno]))


def _start_of_comments(module: ModuleSource, statement: Any) -> int:
    """Where the comments directly above a statement start, or else the statement's line."""
    number = first_line(statement)
    while module.line(number - 1).strip().startswith("#"):
        number -= 1
    return module.starts[number]
