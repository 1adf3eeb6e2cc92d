"""From the two sides of a hunk to edits: the syntax of both is compared, and only what differs is changed.

Statements are told apart by lines: of a statement that keeps a line, the parts are compared; others are inserted,
deleted or replaced with their lines, comments included. A statement of one line that is replaced by another without a
comment is compared as well. Of an expression, the smallest part that differs is replaced; what is put around it, or
into a list, is inserted.
"""

from __future__ import annotations

import ast
import itertools
import keyword
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from .matching import END, START, Match, as_python, first_of, is_gap, is_named_gap, last_of, located
from .source import Definition, Edit, ModuleSource, unrecognized
from .tree import BLOCKS, first_line

_IGNORED = {"ctx", "kind", "type_comment"}
_NEAR = 200
"""How many characters are looked through for a parenthesis."""
_BINDING = (ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Attribute, ast.Subscript)
_COMPOUND = (ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Lambda, ast.NamedExpr, ast.Await)


class PatchError(ValueError):
    """A patch that cannot be read; the message has the line of its text."""


class Line(NamedTuple):
    """A line of a hunk: ``mark`` is a blank, ``-`` or ``+``, ``number`` counts the lines of the patch."""

    mark: str
    text: str
    number: int


class Side:
    """The pattern, or what becomes of it: the text and syntax of the lines with one of the ``marks``."""

    def __init__(self, lines: Sequence[Line], marks: str, what: str) -> None:
        self.origin = [line for line in lines if line.mark in marks]
        self.source = ModuleSource(what, what, as_python("\n".join(line.text for line in self.origin)))
        self.lines = self.source.text.split("\n")
        try:
            self.body = ast.parse(self.source.text).body
        except SyntaxError as error:
            number = self.origin[min(error.lineno or 1, len(self.origin)) - 1].number
            raise PatchError(f"line {number}: {what} is no Python: {error.msg}") from error

    def number(self, node: Any) -> int:
        """The line of the patch in which a node begins."""
        return self.origin[int(node.lineno) - 1].number

    def kept(self, node: Any) -> set[int]:
        """The lines of a statement that both sides have, as numbers of the patch."""
        lines = self.origin[first_line(node) - 1 : node.end_lineno]
        return {line.number for line in lines if line.mark == " "}

    def added(self, made: Sequence[ast.stmt]) -> str:
        """The ``+`` lines of these statements, with the comments and blank lines above, and below where they end."""
        first, last = first_line(made[0]), made[-1].end_lineno or 0
        while first > 1 and self._is_comment(first - 1):
            first -= 1
        end = last
        while end < len(self.lines) and self._is_comment(end + 1):
            end += 1
        if end == len(self.lines) or self.origin[end].mark != "+":
            last = end
        lines = [self.lines[place] for place in range(first - 1, last) if self.origin[place].mark == "+"]
        return "\n" + textwrap.dedent("\n".join(lines)) + "\n"

    def _is_comment(self, number: int) -> bool:
        """Whether a line is a ``+`` line with nothing but a comment, or blank."""
        return self.origin[number - 1].mark == "+" and self.lines[number - 1].strip()[:1] in ("", "#")

    def span(self, node: Any) -> tuple[int, int]:
        """The characters at which a node starts and ends, with the parentheses around it."""
        return with_parentheses(self.source.text, *self.source.span(node))

    def piece(self, start: int, end: int) -> Piece:
        """The text between two characters."""
        first = self.source.text[:start].rpartition("\n")[2] + self.source.text[start:].partition("\n")[0]
        return Piece(self.source.text[start:end].split("\n"), len(first) - len(first.lstrip()))


def with_parentheses(text: str, start: int, end: int) -> tuple[int, int]:
    """Where a part of some Python text starts and ends with the parentheses around it; those of a call are not."""
    if text[start] == "(" and _is_called(text[:start]):  # a generator that is all that a call is given
        return start + 1, end - 1
    while True:
        before, after = text[max(start - _NEAR, 0) : start].rstrip(), text[end : end + _NEAR].lstrip()
        if before[-1:] != "(" or after[:1] != ")" or _is_called(before[:-1]):
            return start, end
        start, end = text.rindex("(", 0, start), text.index(")", end) + 1


def _is_called(before: str) -> bool:
    """Whether a parenthesis behind this text is that of a call."""
    callee = re.search(r"(\w+|[)\]]) *\Z", before[-_NEAR:])
    return callee is not None and not keyword.iskeyword(callee[1])


class Piece(NamedTuple):
    """Text of a patch, which begins in a line with this indent."""

    lines: list[str]
    indent: int

    def indented(self, indent: int) -> str:
        """The text where the line that it begins in has another indent."""
        more = indent - self.indent
        moved = [" " * max(len(line) - len(line.lstrip()) + more, 0) + line.lstrip() for line in self.lines[1:]]
        return "\n".join([self.lines[0], *moved])


Spot: TypeAlias = "tuple[Any, int]"
"""A located node of a pattern, and which end of it."""


class Splice(NamedTuple):
    """Replace what stands between two spots by text, or insert it where both are one spot.

    Parentheses around the nodes belong to them.
    """

    start: Spot
    end: Spot
    piece: Piece

    def edits(self, place: Definition, match: Match) -> list[Edit]:
        module, nodes = place.module, [_at(place, match, spot) for spot in (self.start, self.end)]
        spans = [with_parentheses(module.text, *module.span(node)) for node in nodes]
        start, end = spans[0][self.start[1]], spans[1][self.end[1]]
        line = module.text[:start].rpartition("\n")[2] + module.text[start:].partition("\n")[0]
        indent = len(line) - len(line.lstrip())
        if self.start[1] == START and not self.piece.lines[-1].strip():  # what follows keeps its column
            indent = len(module.text[:start].rpartition("\n")[2])
        return [Edit(module.name, start, end, _filled(place, match, self.piece.indented(indent)))]


class Insertion(NamedTuple):
    """Put lines above or below a statement."""

    beside: Spot
    text: str

    def edits(self, place: Definition, match: Match) -> list[Edit]:
        insert = place.insert_before if self.beside[1] == START else place.insert_after
        return [insert(_at(place, match, self.beside), _filled(place, match, self.text))]


class Replacement(NamedTuple):
    """Put lines in the place of those of adjacent statements; without ``text``, delete these."""

    nodes: list[Any]
    text: str

    def edits(self, place: Definition, match: Match) -> list[Edit]:
        nodes = [_at(place, match, (node, START)) for node in self.nodes]
        if not self.text:
            return [place.delete(node) for node in nodes]
        edit = place.replace(nodes[0], _filled(place, match, self.text))
        place.whole_lines(nodes[-1])  # raises where something else stands on the last line
        return [Edit(edit.module, edit.start, place.module.span(nodes[-1])[END], edit.text)]


Change: TypeAlias = "Splice | Insertion | Replacement"
Changes: TypeAlias = "list[Change]"


def _at(place: Definition, match: Match, spot: Spot) -> Any:
    if spot not in match:
        raise unrecognized("something to stand beside in what `...` is", place)
    return match[spot]


def _filled(place: Definition, match: Match, text: str) -> str:
    """The text with what ``ANY_NAME`` stands for, in parentheses where something beside it could take a part of it."""

    def fill(name: re.Match[str]) -> str:
        node = match[name.group()]
        is_begun = re.search(r"([(\[{,:]|(?<![=!<>])=|\A)\s*\Z", text[: name.start()])
        is_alone = is_begun and re.match(r"\s*([)\]},:]|\Z)", text[name.end() :])
        is_whole = is_alone or not isinstance(node, _COMPOUND)
        return place.text(node) if is_whole else f"({place.text(node)})"

    return re.sub(r"\bANY_\w+", fill, text)


def compare(old: Side, new: Side) -> Changes:
    """The changes that make ``new`` of ``old``; raises `PatchError`."""
    return _Comparison(old, new).blocks(old.body, new.body)


class _Comparison:
    def __init__(self, old: Side, new: Side) -> None:
        self.old, self.new = old, new

    def blocks(self, olds: list[ast.stmt], news: list[ast.stmt]) -> Changes:
        """The changes of a block of statements."""
        changes: Changes = []
        at, to = 0, 0
        for i, j in [*self.pairs(olds, news), (len(olds), len(news))]:
            changes += self.changed_run(olds, news, range(at, i), range(to, j))
            if i < len(olds):
                changes += self.statement(olds[i], news[j])
            at, to = i + 1, j + 1
        return changes

    def pairs(self, olds: list[ast.stmt], news: list[ast.stmt]) -> list[tuple[int, int]]:
        """The statements of two blocks that have a line in common, as places."""
        kept = [list(map(side.kept, block)) for side, block in ((self.old, olds), (self.new, news))]
        pairs = [(i, j) for i, ours in enumerate(kept[0]) for j, theirs in enumerate(kept[1]) if ours & theirs]
        for (i, j), (k, m) in itertools.pairwise(pairs):
            if i >= k or j >= m:
                raise PatchError(f"line {self.old.number(olds[i])}: lines of one statement become several")
        return pairs

    def changed_run(self, olds: list[ast.stmt], news: list[ast.stmt], gone: range, made: range) -> Changes:
        """The changes where these statements of a block, of which no line stays, become others."""
        if not made:
            return [self.replacement(olds[gone.start : gone.stop], "")] if gone else []
        first = news[made[0]]
        text = self.new.added(news[made.start : made.stop])
        if not gone:
            return [Insertion(self.beside(olds, gone.start, first), text)]
        before = olds[gone.start : gone.stop]
        if len(gone) == len(made) == 1 and type(before[0]) is type(first) and "#" not in text:
            changes = self.parts(before[0], first)
            if changes is not None:
                return changes
        return [self.replacement(before, text)]

    def replacement(self, statements: list[ast.stmt], text: str) -> Replacement:
        return Replacement([self.locate(statement) for statement in statements], text)

    def beside(self, olds: list[ast.stmt], place: int, made: ast.stmt) -> Spot:
        """The statement that an insertion at a place of a block stands below, or else above."""
        above, below = olds[:place][-1:], olds[place:][:1]
        for block, side in ((above, END), (below, START)):
            if block and not is_gap(block[0]) and not is_named_gap(block[0]):
                return self.locate(block[0]), side
        raise PatchError(f"line {self.new.number(made)}: no statement of the same block above or below")

    def locate(self, node: Any) -> Any:
        """Have matches say what a node has matched; a pattern of one expression does not match a statement."""
        is_alone = len(self.old.body) == 1 and node is self.old.body[0] and isinstance(node, ast.Expr)
        return located(node.value if is_alone else node)

    def statement(self, old: Any, new: Any) -> Changes:
        """The changes of a statement that keeps a line."""
        branch = self.kept_branch(old, new)
        if branch is not old:
            piece = self.new.piece(*self.new.span(new.test))
            test = Splice((located(old.test), START), (located(branch.test), END), piece)
            return [test, *self.blocks(branch.body, new.body), *self.blocks(branch.orelse, new.orelse)]
        changes = self.parts(old, new)
        if changes is not None:
            return changes
        is_plain = not any(getattr(old, block, None) for block in ("orelse", "finalbody", "handlers"))
        bodies = [getattr(side, "body", None) for side in (old, new)]
        if not (is_plain and all(bodies)) or is_gap(old.body[0]) != is_gap(new.body[0]):
            raise PatchError(f"line {self.new.number(new)}: neither whole statements nor an expression that changes")
        head = self.new.piece(self.new.span(new)[START], self.new.span(new.body[0])[START])
        return [
            Splice((located(old), START), (located(old.body[0]), START), head),
            *self.blocks(old.body, new.body),
        ]

    def kept_branch(self, old: Any, new: Any) -> Any:
        """Of an ``if`` whose first branches go, the ``elif`` that ``new`` is made of; else ``old`` itself."""
        while (
            isinstance(old, ast.If)
            and isinstance(new, ast.If)
            and any(map(self.new.kept, new.body))
            and not any(map(self.old.kept, old.body))
            and [*map(type, old.orelse)] == [ast.If]
        ):
            old = old.orelse[0]
        return old

    def parts(self, old: Any, new: Any) -> Changes | None:
        """The changes inside of a node; None if it has to be replaced as a whole by what it is in."""
        if _is_same(old, new):
            return []
        whole = self.whole(old, new)  # marks ``old`` as located, too
        wrapped = self.wrapped(old, new)
        is_other = type(old) is not type(new) or isinstance(old, (ast.Dict, ast.JoinedStr))
        if wrapped or is_other:
            return wrapped or whole
        changes: Changes = []
        for part, ours, theirs in _parts(old, new):
            if part in BLOCKS and isinstance(ours, list):
                found: Changes | None = self.blocks(ours, theirs)
            elif isinstance(ours, list):
                found = self.items(ours, theirs)
            elif isinstance(ours, ast.AST) and isinstance(theirs, ast.AST):
                found = self.parts(ours, theirs)
            else:
                found = [] if ours == theirs else None
            if found is None:
                return whole
            changes += found
        return changes

    def whole(self, old: Any, new: Any) -> Changes | None:
        """The replacement of an expression."""
        if not (isinstance(old, ast.expr) and isinstance(new, ast.expr)):
            return None
        return [Splice((located(old), START), (located(old), END), self.new.piece(*self.new.span(new)))]

    def wrapped(self, old: Any, new: Any) -> Changes:
        """What is put around an expression, if the new one holds it as it was."""
        if not (isinstance(old, ast.expr) and isinstance(new, ast.expr)):
            return []
        outer, inner = next(
            ((outer, node) for outer in ast.walk(new) for node in ast.iter_child_nodes(outer) if _is_same(old, node)),
            (None, None),
        )
        if inner is None or (isinstance(outer, _BINDING) and isinstance(old, ast.Name) and old.id.startswith("ANY")):
            return []
        (start, end), (first, last) = self.new.span(new), self.new.span(inner)
        pieces = [((located(old), START), start, first), ((located(old), END), last, end)]
        return [Splice(spot, spot, self.new.piece(a, b)) for spot, a, b in pieces if a != b]

    def items(self, olds: list[Any], news: list[Any]) -> Changes | None:
        """The changes of a list of expressions or the like; None if there is more to do than to insert or replace."""
        start = _common(olds, news)
        stay = _common(olds[start:][::-1], news[start:][::-1])
        gone, made = olds[start : len(olds) - stay], news[start : len(news) - stay]
        if not gone:
            return self.inserted(olds, news, start, len(made))
        if len(gone) != len(made):
            return None
        found = [self.parts(old, new) for old, new in zip(gone, made, strict=True)]
        return None if None in found else [change for changes in found for change in changes or ()]

    def inserted(self, olds: list[Any], news: list[Any], place: int, count: int) -> Changes | None:
        """The insertion of ``count`` items in front of one of a list, or behind the last."""
        made = news[place : place + count]
        if not made or not all(hasattr(first_of(item), "lineno") for item in made):
            return None if made else []
        if place < len(olds):
            spot = located(first_of(olds[place])), START
            start, end = (self.new.span(first_of(item))[START] for item in (made[0], news[place + count]))
        elif place and (not isinstance(made[0], ast.arg) or is_gap(olds[-1])):
            spot = located(last_of(olds[-1])), END
            start, end = (self.new.span(last_of(item))[END] for item in (news[place - 1], made[-1]))
        else:
            return None
        return [Splice(spot, spot, self.new.piece(start, end))]


def _parts(old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """The parts of two nodes of one type, by name; what is one list in the text is one here."""
    if isinstance(old, ast.Call):
        yield "func", old.func, new.func
        yield "args", [*old.args, *old.keywords], [*new.args, *new.keywords]
    elif isinstance(old, ast.arguments) and len(old.args + old.kwonlyargs) != len(new.args + new.kwonlyargs):
        yield "args", _parameters(old), _parameters(new)
    else:
        for part in old._fields:
            if part not in _IGNORED:
                yield part, getattr(old, part, None), getattr(new, part, None)


def _parameters(arguments: ast.arguments) -> list[ast.arg]:
    """Parameters whose text ends with their defaults."""
    by_place = zip(reversed(arguments.args), reversed(arguments.defaults), strict=False)
    for parameter, default in (*by_place, *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)):
        if default:
            parameter.end_lineno, parameter.end_col_offset = default.end_lineno, default.end_col_offset
    return arguments.args + arguments.kwonlyargs


def _common(olds: list[Any], news: list[Any]) -> int:
    """With how many that are the same two lists begin."""
    pairs = enumerate(zip(olds, news, strict=False))
    return next((place for place, (old, new) in pairs if not _is_same(old, new)), min(len(olds), len(news)))


def _is_same(old: Any, new: Any) -> bool:
    """Whether two pieces of syntax are the same."""
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_is_same, old, new))
    if not isinstance(old, ast.AST) or type(old) is not type(new):
        return type(old) is type(new) and bool(old == new)
    parts = [part for part in old._fields if part not in _IGNORED]
    return all(_is_same(getattr(old, part, None), getattr(new, part, None)) for part in parts)
