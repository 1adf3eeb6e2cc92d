"""From the two sides of a hunk to edits: where their syntax differs, the text between two matched nodes is replaced.

`compare` walks both syntax trees together. It notes a `Change` for each run of statements that differs, and for the
smallest part of one where only that does. A change starts and ends at nodes of the pattern, and a match says where
these are.
"""

from __future__ import annotations

import ast
import keyword
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise, takewhile
from typing import Any, NamedTuple, TypeAlias

from .definition import Definition, unrecognized
from .matching import Match, as_python, blocks_of, is_any, is_gap, is_placed
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

    def lines_of(self, node: Any) -> list[Line]:
        return self.lines[first_line(node) - 1 : node.end_lineno]

    def indent(self, node: Any) -> str:
        return _indent_at(self.module.text, self.module.starts[node.lineno])

    def kept(self, statements: Sequence[Any]) -> set[int]:
        """Which lines of the patch some statements have on both sides."""
        return {line.number for node in statements for line in self.lines_of(node) if line.mark == " "}

    def added(self, first: int, last: int) -> str:
        """The text of these lines, with the comments above and the blank lines around that are added with them."""
        above = [*takewhile(lambda line: _is_filling(line, "#"), reversed(self.lines[: first - 1]))]
        below = [*takewhile(lambda line: _is_filling(line, "\n"), self.lines[last:])]
        lines = self.lines[first - 1 - len(above) : last + len(below)]
        return textwrap.dedent("\n".join(line.text for line in lines)) + "\n"


def _is_filling(line: Line, start: str) -> bool:
    """Whether a line is added, and is blank or starts so."""
    return line.mark == "+" and (line.text.strip() or start).startswith(start)


class Spot(NamedTuple):
    """Where a node of the pattern starts or ends; with a ``field``, where the first node of that list in it does."""

    node: Any
    side: int
    field: str = ""

    def node_in(self, match: Match) -> Any:
        """The node of the source."""
        node = match.bound[self.node]
        return getattr(node, self.field)[0] if self.field else node


class LineChange(NamedTuple):
    """Put ``text`` in the place of the lines between two spots, or between two lines where both are one spot."""

    start: Spot
    end: Spot
    text: str

    def edit(self, definition: Definition, match: Match) -> Edit:
        module, first, last = definition.module, self.start.node_in(match), self.end.node_in(match)
        start = whole_lines(definition, first)[self.start.side]
        end = whole_lines(definition, last)[self.end.side]
        if self.start != self.end and self.end.side == START:  # comments stay with the block below them
            end = _start_of_comments(module, last)
        if not self.text:
            start = _start_of_comments(module, first)
        return Edit(module.name, start, end, indented(module, first, _filled(definition, match, self.text)))


class TextChange(NamedTuple):
    """Put ``text`` in the place of what is between two spots of an expression, or at one."""

    start: Spot
    end: Spot
    text: str

    def edit(self, definition: Definition, match: Match) -> Edit:
        module = definition.module
        start, end = (span(module, spot.node_in(match))[spot.side] for spot in (self.start, self.end))
        text = self.text.replace("\n", "\n" + _indent_at(module.text, start))
        return Edit(module.name, start, end, _filled(definition, match, text))


Change: TypeAlias = "LineChange | TextChange"


def compare(old: Side, new: Side) -> list[Change]:
    """The changes that make ``new`` of ``old``; raises `PatchError`."""
    return [*_Comparison(old, new).block(old.body, new.body)]


class _UnlikeError(Exception):
    """Two nodes have too little in common for a change within one of them."""


class _Comparison:
    """The changes between nodes of two sides; those of parts raise `_UnlikeError`."""

    def __init__(self, old: Side, new: Side) -> None:
        self._old, self._new = old, new

    def block(self, olds: Sequence[Any], news: Sequence[Any]) -> Iterator[Change]:
        """The changes of a block. Statements with a line in common are the same one; between them all differ."""
        same = [
            (number, other)
            for number, old in enumerate(olds)
            for other, new in enumerate(news)
            if self._old.kept([old]) & self._new.kept([new])
        ]
        for (above, above_new), (below, below_new) in pairwise([(-1, -1), *same, (len(olds), len(news))]):
            gone, made = olds[above + 1 : below], news[above_new + 1 : below_new]
            if gone and made:
                yield from self._rewritten(gone, made)
            elif gone:
                yield LineChange(Spot(_unwrapped(gone[0]), START), Spot(_unwrapped(gone[-1]), END), "")
            elif made:
                yield self._inserted(olds[max(above, 0) : above + 1], olds[below : below + 1], made)
            if below < len(olds):
                yield from self._rewritten([olds[below]], [news[below_new]])

    def _inserted(self, above: Sequence[Any], below: Sequence[Any], made: Sequence[Any]) -> Change:
        """New statements, below the one above them, or else above the next one."""
        for neighbours, side in ((above, END), (below, START)):
            if neighbours and not is_gap(neighbours[0]):
                spot = Spot(_unwrapped(neighbours[0]), side)
                return LineChange(spot, spot, self._new.added(first_line(made[0]), made[-1].end_lineno))
        number = self._new.lines_of(made[0])[0].number
        raise PatchError(f"line {number}: no statement of the same block above or below")

    def _rewritten(self, gone: Sequence[Any], made: Sequence[Any]) -> Iterator[Change]:
        """Statements that become others: in a part of one, or else in whole lines."""
        old, new = _unwrapped(gone[0]), _unwrapped(made[0])
        if self._old.indent(gone[0]) != self._new.indent(made[0]):  # `elif` has become `else`, or the reverse
            raise _UnlikeError
        start, end, last = Spot(old, START), Spot(_unwrapped(gone[-1]), END), made[-1].end_lineno
        if len(gone) == len(made) == 1:
            with suppress(_UnlikeError):
                if not self._has_comment(new):
                    yield from self._part(old, new)
                    return
            if block := self._common_block(old, new):  # it gets another head
                owner, field = block
                yield from self.block(getattr(owner, field), new.body)
                end, last = Spot(owner, START, field), first_line(new.body[0]) - 1
        text = self._new.added(first_line(new), last)
        if _has_gap(text):
            number = self._new.lines_of(new)[0].number
            raise PatchError(f"line {number}: neither whole statements nor a part of an expression")
        yield LineChange(start, end, text)

    def _has_comment(self, new: Any) -> bool:
        """Whether the head of a statement is all new, and has a comment."""
        body = getattr(new, "body", None)
        end = first_line(body[0]) - 1 if isinstance(body, list) else new.end_lineno
        head = self._new.lines[first_line(new) - 1 : end]
        return all(line.mark == "+" for line in head) and any("#" in line.text for line in head)

    def _common_block(self, old: Any, new: Any) -> tuple[Any, str] | None:
        """The owner and the name of the innermost block of ``old`` that is the body of ``new``, at the end of both."""
        body = getattr(new, "body", None)
        kept = self._new.kept(body) if isinstance(body, list) and body[-1].end_lineno == new.end_lineno else None
        for owner in reversed([*ast.walk(old)]) if kept else ():
            for field in blocks_of(owner):
                block = getattr(owner, field)
                if block and block[-1].end_lineno == old.end_lineno and self._old.kept(block) == kept:
                    return owner, field
        return None

    def _part(self, old: Any, new: Any) -> list[Change]:
        """The changes from one node to another: in it, around it where ``new`` contains it, or all of it."""
        if _is_same(old, new):
            return []
        if not (isinstance(old, ast.AST) and isinstance(new, ast.AST)) or is_gap(old) or is_gap(new):
            raise _UnlikeError
        with suppress(_UnlikeError):
            return [*self._within(old, new)]
        if isinstance(old, ast.stmt) or isinstance(new, ast.stmt) or not is_placed(old):
            raise _UnlikeError
        before, after = Spot(old, START), Spot(old, END)
        start, end = span(self._new.module, new)
        for inner in ast.walk(new) if not is_any(old) else ():
            if _is_same(old, inner):
                inner_start, inner_end = span(self._new.module, inner)
                return [
                    *self._text(before, before, start, inner_start),
                    *self._text(after, after, inner_end, end),
                ]
        return [*self._text(before, after, start, end)]

    def _within(self, old: Any, new: Any) -> Iterator[Change]:
        """The changes of the parts of two nodes of the same kind."""
        if type(old) is not type(new) or isinstance(old, ast.JoinedStr):  # Python 3.10 does not place parts of these
            raise _UnlikeError
        for field in old._fields:
            ours, theirs = (_field(node, field) for node in (old, new))
            if field in blocks_of(old):
                if bool(ours) != bool(theirs) or self._old.kept(ours) != self._new.kept(theirs):
                    raise _UnlikeError
                yield from self.block(ours, theirs)
            elif not isinstance(ours, list):
                yield from self._part(ours, theirs)
            elif len(ours) == len(theirs):
                for one, other in zip(ours, theirs, strict=True):
                    yield from self._part(one, other)
            elif field in ("args", "elts", "items", "values") and not isinstance(old, ast.Dict):
                yield from self._added(old, field, ours, theirs)
            else:
                raise _UnlikeError

    def _added(self, owner: Any, field: str, olds: Sequence[Any], news: Sequence[Any]) -> Iterator[Change]:
        """Items that are added to a list, before the next one or else after the one before."""
        first = len([*takewhile(bool, map(_is_same, olds, news))])
        last = len([*takewhile(bool, map(_is_same, reversed(olds[first:]), reversed(news)))])
        if first + last < len(olds):
            raise _UnlikeError
        spans = [span(self._new.module, item) for item in news]
        if last and not is_gap(olds[first]):
            spot, start, end = Spot(olds[first], START), spans[first][START], spans[-last][START]
        elif first and not is_gap(olds[first - 1]):
            spot, start, end = Spot(olds[first - 1], END), spans[first - 1][END], spans[-last - 1][END]
        elif last and not first and field == "items":  # in front of `...`
            spot, start, end = Spot(owner, START, field), spans[0][START], spans[-last][START]
        else:
            raise _UnlikeError
        yield from self._text(spot, spot, start, end)

    def _text(self, spot: Spot, other: Spot, start: int, end: int) -> Iterator[Change]:
        """The change to what is between two characters of the new side."""
        text = self._new.module.text[start:end]
        if _has_gap(text):
            raise _UnlikeError
        if text:
            yield TextChange(spot, other, text.replace("\n" + _indent_at(self._new.module.text, start), "\n"))


def _unwrapped(statement: Any) -> Any:
    """The expression that is a statement; else the statement."""
    return statement.value if isinstance(statement, ast.Expr) else statement


def _field(node: Any, name: str) -> Any:
    """A part of a node; all arguments of a call are one list."""
    if isinstance(node, ast.Call) and name in ("args", "keywords"):
        arguments = [*node.args, *node.keywords]
        return sorted(arguments, key=lambda each: (each.lineno, each.col_offset)) if name == "args" else []
    return getattr(node, name, None)


def _is_same(old: Any, new: Any) -> bool:
    return ast.dump(old) == ast.dump(new) if isinstance(old, ast.AST) and isinstance(new, ast.AST) else old == new


def _has_gap(text: str) -> bool:
    """Whether a text has parts that stand for any others, so that it cannot be put anywhere."""
    return re.search(r"\.\.\.|\bANY\b", text) is not None


def span(module: ModuleSource, node: Any) -> tuple[int, int]:
    """Where a part of a statement starts and ends with the parentheses around it; those of a call are not."""
    text, (start, end) = module.text, module.span(node)
    if text[start] == "(" and _is_called(text[:start]):  # a generator that is all that a call is given
        return start + 1, end - 1
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
