"""From the two sides of a hunk to edits of the source.

`compare` goes through both sides by their lines of code. Those that are added or taken away are whole lines of the
source, too. Of one that becomes another, all from the first token that differs to the last is replaced. Each change
starts and ends at nodes of the pattern, and a match says where these are in the source.
"""

from __future__ import annotations

import ast
import io
import keyword
import re
import textwrap
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import takewhile
from operator import itemgetter
from os.path import commonprefix
from typing import Any, NamedTuple, TypeAlias

from .definition import Definition, unrecognized
from .matching import Match, as_python, is_gap
from .source import Edit, ModuleSource, first_line

START, END = 0, 1
_NEAR = 200
"""How many characters are looked through for a parenthesis."""
_COMPOUND = (ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Lambda, ast.NamedExpr, ast.Await)


class PatchError(ValueError):
    """A patch that cannot be read; the message has the line of its text."""


class Line(NamedTuple):
    """A line of a hunk: ``mark`` is a blank, ``-`` or ``+``, ``number`` counts the lines of the patch."""

    mark: str
    text: str
    number: int


class Row(NamedTuple):
    """A line of code: its tokens with their character offsets, and the lines of the hunk that it is on.

    ``above`` are the comments and blank lines in front of it.
    """

    words: list[str]
    starts: list[int]
    ends: list[int]
    indent: int
    above: list[Line]
    lines: list[Line]

    @property
    def number(self) -> int:
        return self.lines[0].number

    @property
    def has_comment(self) -> bool:
        return any("#" in line.text for line in self.lines)


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
        tokens: list[tokenize.TokenInfo] = []
        above = 0
        for token in tokenize.generate_tokens(io.StringIO(self.module.text).readline):
            if token.type == tokenize.NEWLINE:
                starts = [self.module.starts[line] + column for line, column in (token.start for token in tokens)]
                ends = [self.module.starts[line] + column for line, column in (token.end for token in tokens)]
                (first, indent), (last, _) = tokens[0].start, tokens[-1].end
                lines = self.lines[above : first - 1], self.lines[first - 1 : last]
                yield Row([token.string for token in tokens], starts, ends, indent, *lines)
                tokens, above = [], last
            elif token.string.strip() and token.type != tokenize.COMMENT:
                tokens.append(token)

    def added(self, rows: Sequence[Row]) -> str:
        """The text of new rows, with the comments above and the blank lines around that are added with them."""
        lines = [line for row in rows for line in (*row.above, *row.lines)]
        below = self.lines[self.lines.index(lines[-1]) + 1 :]
        lines += takewhile(lambda line: line.mark == "+" and not line.text.strip(), below)
        return textwrap.dedent("\n".join(line.text for line in lines if line.mark == "+")) + "\n"


class Spot(NamedTuple):
    """Where a node of the pattern starts or ends; ``...`` starts with the first node that it stands for."""

    node: Any
    side: int


class LineChange(NamedTuple):
    """Put ``text`` in the place of the lines between two spots, or between two lines where both are one spot."""

    start: Spot
    end: Spot
    text: str

    def edit(self, definition: Definition, match: Match) -> Edit:
        module, first, last = definition.module, match.bound[self.start.node], match.bound[self.end.node]
        start = whole_lines(definition, first)[self.start.side]
        end = whole_lines(definition, last)[self.end.side]
        if self.start != self.end and self.end.side == START:  # comments stay with the block below them
            end = _start_of_comments(module, last)
        if not self.text:
            start = _start_of_comments(module, first)
        return Edit(module.name, start, end, indented(module, first, _filled(definition, match, self.text)))


class TextChange(NamedTuple):
    """Put ``text`` in the place of what is between two spots in a line of code, or at one."""

    start: Spot
    end: Spot
    text: str

    def edit(self, definition: Definition, match: Match) -> Edit:
        module = definition.module
        start, end = (span(module, match.bound[spot.node])[spot.side] for spot in (self.start, self.end))
        text = self.text.replace("\n", "\n" + _indent_at(module.text, start))
        return Edit(module.name, start, end, _filled(definition, match, text))


Replacement: TypeAlias = "LineChange | TextChange"


def compare(old: Side, new: Side) -> list[Replacement]:
    """The changes that make ``new`` of ``old``; raises `PatchError`."""
    return [*_Comparison(old, new).changes()]


class _Comparison:
    def __init__(self, old: Side, new: Side) -> None:
        self._old, self._new = old, new
        nodes: list[Any] = [*old.body]
        for node in nodes:  # outer ones first
            if not is_gap(node) and not isinstance(node, ast.JoinedStr):  # Python 3.10 does not place parts of these
                nodes += ast.iter_child_nodes(node)
        placed = [(old.module.span(node), node) for node in nodes if _is_placed(node)]
        self._by_ends = dict(placed)
        self._spots = {(START, start): Spot(node, START) for (start, _), node in placed}
        self._spots |= {(END, end): Spot(node, END) for (_, end), node in placed if not is_gap(node)}
        statements = [(ends, node) for ends, node in placed if isinstance(node, (ast.stmt, ast.excepthandler))]
        self._statements = {
            (side, ends[side], node.col_offset): Spot(_unwrapped(node), side)
            for ends, node in statements
            for side in (START, END)
            if side == START or not is_gap(node)
        }

    def changes(self) -> Iterator[Replacement]:
        """Rows with a line in common are the same one. Between these, ``-`` rows become the ``+`` rows after them."""
        rows = {line.number: row for row in self._new.rows for line in row.lines}
        steps: list[tuple[int, Row | None, Row | None]] = []
        for row in self._old.rows:
            kept = [rows.pop(line.number) for line in row.lines if line.number in rows]
            steps.append((row.number, row, kept[0] if kept else None))
        kept_new = {new.number for _, _, new in steps if new}
        steps += [(row.number, None, row) for row in self._new.rows if row.number not in kept_new]
        start = stop = 0
        made: list[Row] = []
        for _, old, new in sorted(steps, key=itemgetter(0)):
            if old and (new or made):
                yield from self._replaced(start, stop, made)
                start, made = stop, []
            if old and new:
                yield from self._within(old, new)
                start = stop + 1
            if old:
                stop += 1
            elif new:
                made.append(new)
        yield from self._replaced(start, stop, made)

    def _replaced(self, start: int, stop: int, rows: list[Row]) -> Iterator[Replacement]:
        """The changes that make ``rows`` of old rows, by their blocks, the innermost first."""
        old = self._old.rows
        all_gone, all_made = _by_block(old[start:stop]), _by_block(rows)
        for indent in sorted({*all_gone, *all_made}, reverse=True):
            gone, made = all_gone[indent], all_made[indent]
            start += len(gone)
            if [row.indent for row in gone] == [row.indent for row in made] and not any(row.has_comment for row in made):
                for one, other in zip(gone, made, strict=True):
                    yield from self._within(one, other)
                continue
            if gone:
                first = self._statement(START, gone, indent)
                last = self._statement(END, gone, indent) or (self._statement(START, old[stop:], old[stop].indent) if old[stop:] else None)
            else:
                first = last = self._statement(END, old[:start], indent) or self._statement(START, old[start:], indent)
            if not first or not last:
                raise _error(made or gone, "no statement of the same block above or below")
            text = self._new.added(made) if made else ""
            yield LineChange(first, last, _fillable(text, made) if gone else text)

    def _statement(self, side: int, rows: list[Row], indent: int) -> Spot | None:
        """Where a statement with this indent starts with the first of some rows, or ends with the last."""
        offset = (rows[0].starts[0], rows[-1].ends[-1])[side] if rows else -1
        return self._statements.get((side, offset, indent))

    def _within(self, old: Row, new: Row) -> Iterator[TextChange]:
        """The change from the first token that differs to the last, widened to ends of nodes and to whole brackets."""
        if old.words == new.words:
            return
        start = len(commonprefix([old.words, new.words]))
        rest = len(commonprefix([old.words[start:][::-1], new.words[start:][::-1]]))
        while start >= 0 and rest >= 0:
            stop, new_stop = len(old.words) - rest, len(new.words) - rest
            left, right = self._around(old, start, stop)
            unpaired = _unpaired(old.words[start:stop]) + _unpaired(new.words[start:new_stop])
            # An operator beside ANY could take a part of what that stands for.
            if not left or any(word in ")]}" for word in unpaired) or _is_any(old.words[:start][-1:]):
                start -= 1
            elif not right or unpaired or _is_any(old.words[stop:][:1]):
                rest -= 1
            else:
                first = new.starts[start] if left.side == START else new.ends[start - 1]
                last = new.starts[new_stop] if right.side == START else new.ends[new_stop - 1]
                text = self._new.module.text
                text = text[first:last].replace("\n" + _indent_at(text, first), "\n")
                yield TextChange(left, right, _fillable(text, [new]))
                return
        raise _error([new], "neither whole statements nor a part of an expression")

    def _around(self, row: Row, start: int, stop: int) -> tuple[Spot | None, Spot | None]:
        """Where to begin and to end for some tokens of a row to be replaced, or none."""
        if start == stop:
            spot = self._spot(row, start, START)
            return spot, spot
        if node := self._by_ends.get((row.starts[start], row.ends[stop - 1])):
            return Spot(node, START), Spot(node, END)
        return self._spot(row, start, START), self._spot(row, stop, END)

    def _spot(self, row: Row, index: int, side: int) -> Spot | None:
        """Where a node starts with a token, or ends with the one before; if both, on this side."""
        keys = [*((START, start) for start in row.starts[index:][:1]), *((END, end) for end in row.ends[:index][-1:])]
        spots = [self._spots[key] for key in keys if key in self._spots]
        return min(spots, key=lambda spot: (is_gap(spot.node), spot.side != side), default=None)


def _is_placed(node: Any) -> bool:
    return isinstance(node, ast.withitem) or hasattr(node, "lineno")


def _unwrapped(statement: Any) -> Any:
    """The expression that is a statement; else the statement."""
    return statement.value if isinstance(statement, ast.Expr) and not is_gap(statement) else statement


def _by_block(rows: Sequence[Row]) -> defaultdict[int, list[Row]]:
    """Rows by the indent of their block: that of the first, or one around it. Inner blocks go with their heads."""
    blocks = defaultdict[int, list[Row]](list)
    indent = rows[0].indent if rows else 0
    for row in rows:
        indent = min(indent, row.indent)
        blocks[indent].append(row)
    return blocks


def _unpaired(words: Sequence[str]) -> list[str]:
    """The brackets that have no partner."""
    brackets: list[str] = []
    for word in words:
        if brackets and brackets[-1] + word in ("()", "[]", "{}"):
            brackets.pop()
        elif word in tuple("()[]{}"):
            brackets.append(word)
    return brackets


def _is_any(words: Sequence[str]) -> bool:
    return any(word.startswith("ANY") for word in words)


def _fillable(text: str, rows: Sequence[Row]) -> str:
    """The text of some rows; raises `PatchError` if parts of it stand for any others, so that it cannot be put anywhere."""
    if re.search(r"\.\.\.|\bANY\b", text):
        raise _error(rows, "neither whole statements nor a part of an expression")
    return text


def _error(rows: Sequence[Row], text: str) -> PatchError:
    return PatchError(f"line {rows[0].lines[0].number}: {text}")


def span(module: ModuleSource, node: Any) -> tuple[int, int]:
    """Where a part of a statement starts and ends with the parentheses around it; those of a call are not."""
    text, (start, end) = module.text, module.span(node)
    while True:
        before, after = text[max(start - _NEAR, 0) : start].rstrip(), text[end : end + _NEAR].lstrip()
        if before[-1:] != "(" or after[:1] != ")" or _is_called(before[:-1]):
            return start, end
        start, end = text.rindex("(", 0, start), text.index(")", end) + 1


def _is_called(before: str) -> bool:
    """Whether a parenthesis after this text is that of a call."""
    callee = re.search(r"(\w+|[)\]]) *\Z", before[-_NEAR:])
    return callee is not None and not keyword.iskeyword(callee[1])


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


def whole_lines(definition: Definition, statement: Any) -> tuple[int, int]:
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
