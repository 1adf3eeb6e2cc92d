"""From the two sides of a hunk to edits: what they do not have in common is put into the text that was matched.

The lines with ``-`` and ``+`` are taken run by run. Where a run is whole statements, whole lines of the source are
inserted, deleted or replaced. Else, and where one statement becomes another of its kind, its tokens are compared: what
stands between their common beginning and their common end is replaced. Each end of that is a place where a node of the
pattern begins or ends; the node that it has matched says where that is in the source.
"""

from __future__ import annotations

import ast
import io
import itertools
import keyword
import re
import textwrap
import tokenize
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from .definition import Definition, unrecognized
from .matching import END, START, Match, as_python, is_gap
from .source import Edit, ModuleSource, first_line

_NEAR = 200
"""How many characters are looked through for a parenthesis."""
_COMPOUND = (ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Lambda, ast.NamedExpr, ast.Await)
_BINDING = re.compile(r"[-+*/%@<>=!|&^.(\[]+|and|or|not|in|is")
"""Tokens that could take a part of an expression beside them."""
_LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER)

Spot: TypeAlias = "tuple[Any, int]"
"""A node of a pattern, and which end of it."""


class PatchError(ValueError):
    """A patch that cannot be read; the message has the line of its text."""


class Line(NamedTuple):
    """A line of a hunk: ``mark`` is a blank, ``-`` or ``+``, ``number`` counts the lines of the patch."""

    mark: str
    text: str
    number: int


class Token(NamedTuple):
    """A token of a side, and the characters at which it starts and ends; ``line`` counts the lines of the side."""

    text: str
    start: int
    end: int
    line: int


class Side:
    """The pattern, or what becomes of it: text, tokens and syntax of the lines with one of the ``marks``."""

    def __init__(self, lines: Sequence[Line], marks: str, what: str) -> None:
        self.lines = [line for line in lines if line.mark in marks]
        self.module = ModuleSource(what, what, as_python("\n".join(line.text for line in self.lines)))
        self.text = self.module.text
        try:
            self.body = ast.parse(self.text).body
        except SyntaxError as error:
            number = self.lines[min(error.lineno or 1, len(self.lines)) - 1].number
            raise PatchError(f"line {number}: {what} is no Python: {error.msg}") from error
        self.statements = [node for root in self.body for node in ast.walk(root) if isinstance(node, ast.stmt)]
        self.tokens = [
            Token(token.string, self._offset(token.start), self._offset(token.end), token.start[0])
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline)
            if token.type not in _LAYOUT
        ]
        first = {token.start: number for number, token in enumerate(self.tokens)}
        self.beginning = {first[self.module.span(node)[START]]: node for node in reversed(self.statements)}
        self.nodes = self._nodes()

    def number(self, line: int) -> int:
        """The line of the patch that a line of this side is."""
        return self.lines[line - 1].number

    def _offset(self, position: tuple[int, int]) -> int:
        return self.module.starts[position[0]] + position[1]

    def _nodes(self) -> dict[tuple[int, int], Any]:
        """The parts of statements by their first token and the one after their last, parentheses around them too."""
        first = {token.start: number for number, token in enumerate(self.tokens)}
        last = {token.end: number + 1 for number, token in enumerate(self.tokens)}
        nodes: dict[tuple[int, int], Any] = {}
        gaps = [cast(ast.Expr, statement).value for statement in self.statements if is_gap(statement)]
        for node in (node for root in self.body for node in ast.walk(root)):
            if isinstance(node, (ast.expr, ast.keyword, ast.arg)) and node not in gaps:
                start, end = with_parentheses(self.text, *self.module.span(node))
                if start in first and end in last:  # a part of an f-string is neither
                    nodes.setdefault((first[start], last[end]), node)
        return nodes

    def whole_statements(self, lines: range) -> list[ast.stmt] | None:
        """The statements that these lines consist of, but for comments and blank lines; None if they do not."""
        inside = [node for node in self.statements if first_line(node) in lines and node.end_lineno in lines]
        outermost: list[Any] = []
        for node in sorted(inside, key=lambda node: (first_line(node), node.col_offset)):
            if not outermost or first_line(node) > outermost[-1].end_lineno:
                outermost.append(node)
        covered = {number for node in outermost for number in range(first_line(node), node.end_lineno + 1)}
        return outermost if covered.issuperset(token.line for token in self.tokens if token.line in lines) else None

    def end_of_whole_statements(self, lines: range) -> int:
        """Where the statements end that these lines begin with, before a head whose blocks go on below the lines."""
        heads = [
            first_line(node) for node in self.statements if first_line(node) in lines and node.end_lineno not in lines
        ]
        stop = min(heads, default=lines.start)
        return lines.start if self.whole_statements(range(lines.start, stop)) is None else stop

    def heads(self, lines: range) -> list[tuple[type[ast.stmt], int]]:
        """The types of the statements that begin in these lines, with their first tokens."""
        heads = [(type(node), first) for first, node in self.beginning.items() if node.lineno in lines]
        return sorted(heads, key=lambda head: head[1])

    def within(self, lines: range) -> range:
        """The tokens in these lines."""
        numbers = [number for number, token in enumerate(self.tokens) if token.line < lines.start]
        inside = [token for token in self.tokens if token.line in lines]
        return range(len(numbers), len(numbers) + len(inside))


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
    """Whether a parenthesis after this text is that of a call."""
    callee = re.search(r"(\w+|[)\]]) *\Z", before[-_NEAR:])
    return callee is not None and not keyword.iskeyword(callee[1])


class Splice(NamedTuple):
    """Replace what stands between two spots by text, or insert it where both are one spot.

    Parentheses around the nodes belong to them. ``indent`` is that of the line in which the text begins.
    """

    start: Spot
    end: Spot
    text: str
    indent: int

    def edits(self, definition: Definition, match: Match) -> list[Edit]:
        module, nodes = definition.module, [_at(definition, match, spot) for spot in (self.start, self.end)]
        spans = [with_parentheses(module.text, *module.span(node)) for node in nodes]
        start, end = spans[0][self.start[1]], spans[1][self.end[1]]
        lines = self.text.split("\n")
        indent = _indent_at(module.text, start)
        if self.start[1] == START and not lines[-1].strip():  # what follows keeps its column
            indent = len(module.text[:start].rpartition("\n")[2])
        more = indent - self.indent
        moved = [" " * max(len(line) - len(line.lstrip()) + more, 0) + line.lstrip() for line in lines[1:]]
        return [Edit(module.name, start, end, _filled(definition, match, "\n".join([lines[0], *moved])))]


class Insertion(NamedTuple):
    """Put lines above or below a statement."""

    beside: Spot
    text: str

    def edits(self, definition: Definition, match: Match) -> list[Edit]:
        insert = insert_before if self.beside[1] == START else insert_after
        return [insert(definition, _at(definition, match, self.beside), _filled(definition, match, self.text))]


class Replacement(NamedTuple):
    """Put lines in the place of those of adjacent statements; without ``text``, delete these."""

    nodes: list[Any]
    text: str

    def edits(self, definition: Definition, match: Match) -> list[Edit]:
        nodes = [_at(definition, match, (node, START)) for node in self.nodes]
        if not self.text:
            return [delete(definition, node) for node in nodes]
        edit = replace(definition, nodes[0], _filled(definition, match, self.text))
        _whole_lines(definition, nodes[-1])  # raises where something else stands on the last line
        return [edit._replace(end=definition.module.span(nodes[-1])[END])]


Change: TypeAlias = "Splice | Insertion | Replacement"


def _at(definition: Definition, match: Match, spot: Spot) -> Any:
    if spot not in match:
        raise unrecognized("something to stand beside in what `...` is", definition)
    return match[spot]


def _indent_at(text: str, offset: int) -> int:
    """The indent of the line at a character."""
    line = text[:offset].rpartition("\n")[2] + text[offset:].partition("\n")[0]
    return len(line) - len(line.lstrip())


def _filled(definition: Definition, match: Match, text: str) -> str:
    """The text with what ``ANY_NAME`` stands for, in parentheses where something beside it could take a part of it."""

    def fill(name: re.Match[str]) -> str:
        node = match[name.group()]
        is_begun = re.search(r"([(\[{,:]|(?<![=!<>])=|\A)\s*\Z", text[: name.start()])
        is_alone = is_begun and re.match(r"\s*([)\]},:]|\Z)", text[name.end() :])
        is_whole = is_alone or not isinstance(node, _COMPOUND)
        return definition.text(node) if is_whole else f"({definition.text(node)})"

    return re.sub(r"\bANY_\w+", fill, text)


def spots(changes: Sequence[Change]) -> frozenset[Any]:
    """The nodes of the pattern that matches have to say the places of."""
    nodes: list[Any] = []
    for change in changes:
        if isinstance(change, Splice):
            nodes += [change.start[0], change.end[0]]
        else:
            nodes += change.nodes if isinstance(change, Replacement) else [change.beside[0]]
    return frozenset(nodes)


def compare(old: Side, new: Side, lines: Sequence[Line]) -> list[Change]:
    """The changes that make ``new`` of ``old``, the two sides of these lines; raises `PatchError`."""
    return [change for gone, made in _runs(lines) for change in _changes(old, new, gone, made)]


def _runs(lines: Sequence[Line]) -> Iterator[tuple[range, range]]:
    """The runs of ``-`` lines with the ``+`` lines after them, as line numbers of the old and of the new side."""
    old = new = 1
    gone = made = 0
    for line in [*lines, Line(" ", "", 0)]:
        if (gone or made) and (line.mark == " " or (line.mark == "-" and made)):
            yield range(old, old + gone), range(new, new + made)
            old, new, gone, made = old + gone, new + made, 0, 0
        if line.mark == " ":
            old, new = old + 1, new + 1
        elif line.mark == "-":
            gone += 1
        else:
            made += 1


def _changes(old: Side, new: Side, gone: range, made: range) -> Iterator[Change]:
    """The changes by which some lines become others."""
    olds, news = old.whole_statements(gone), new.whole_statements(made)
    if olds is None or news is None:
        stop, new_stop = old.end_of_whole_statements(gone), new.end_of_whole_statements(made)
        if stop > gone.start or new_stop > made.start:
            yield from _changes(old, new, range(gone.start, stop), range(made.start, new_stop))
        yield from _splices(old, new, range(stop, gone.stop), range(new_stop, made.stop))
        return
    columns = sorted({node.col_offset for node in [*olds, *news]}, reverse=True)
    if len(columns) > 1:  # the end of a block, and what follows it
        for part, new_part in zip(_parts(olds, gone, columns), _parts(news, made, columns), strict=True):
            yield from _changes(old, new, part, new_part)
        return
    nodes = [_matched(old, node) for node in olds]
    text = "\n" + textwrap.dedent("\n".join(new.text.split("\n")[made.start - 1 : made.stop - 1])) + "\n"
    kinds = [[kind for kind, _ in side.heads(lines)] for side, lines in ((old, gone), (new, made))]
    if not news:
        yield from [Replacement(nodes, "")] if nodes else []
    elif not olds:
        yield Insertion(_beside(old, new, gone.start, news[0]), text)
    elif len(olds) == len(news) == 1 and kinds[0] == kinds[1] and "#" not in text:
        yield from _splices(old, new, gone, made)
    else:
        yield Replacement(nodes, text)


def _parts(statements: Sequence[ast.stmt], lines: range, columns: Sequence[int]) -> Iterator[range]:
    """The lines by the blocks that their statements are in."""
    start = lines.start
    for column in columns:
        ends = [cast(int, node.end_lineno) + 1 for node in statements if node.col_offset == column]
        stop = lines.stop if column == columns[-1] else max(ends, default=start)
        yield range(start, stop)
        start = stop


def _matched(old: Side, node: ast.stmt) -> Any:
    """The node that is matched for a statement; a pattern of one expression does not match a statement."""
    return node.value if isinstance(node, ast.Expr) and old.body == [node] else node


def _beside(old: Side, new: Side, line: int, made: ast.stmt) -> Spot:
    """The statement that an insertion above a line of the old side stands below, or else above."""
    before = [token.line for token in old.tokens if token.line < line][-1:]
    after = [token.line for token in old.tokens if token.line >= line][:1]
    neighbours = [node for node in old.statements if node.col_offset == made.col_offset and not is_gap(node)]
    for node in neighbours:
        if [node.end_lineno] == before:
            return _matched(old, node), END
    for node in neighbours:
        if [first_line(node)] == after:
            return _matched(old, node), START
    raise PatchError(f"line {new.number(made.lineno)}: no statement of the same block above or below")


def _splices(old: Side, new: Side, gone: range, made: range) -> Iterator[Change]:
    """The changes of tokens, statement by statement where both sides have the same kinds of them."""
    heads, new_heads = old.heads(gone), new.heads(made)
    is_same = [kind for kind, _ in heads] == [kind for kind, _ in new_heads]
    tokens, new_tokens = old.within(gone), new.within(made)
    starts = [tokens.start, *(first for _, first in heads if is_same), tokens.stop]
    new_starts = [new_tokens.start, *(first for _, first in new_heads if is_same), new_tokens.stop]
    for (a, b), (c, d) in zip(itertools.pairwise(starts), itertools.pairwise(new_starts), strict=True):
        yield from _splice(old, new, Difference(a, b, c, d))


class Difference(NamedTuple):
    """Tokens ``a`` to ``b`` of the old side become ``c`` to ``d`` of the new one; the others are the same around it."""

    a: int
    b: int
    c: int
    d: int


def _splice(old: Side, new: Side, run: Difference) -> Iterator[Splice]:
    """What replaces tokens by others; the difference is moved and widened until it begins and ends at nodes."""
    a, b, c, d = run
    while a < b and c < d and old.tokens[a].text == new.tokens[c].text:
        a, c = a + 1, c + 1
    while a < b and c < d and old.tokens[b - 1].text == new.tokens[d - 1].text:
        b, d = b - 1, d - 1
    if (a, c) == (b, d):
        return
    for difference in _moved_and_widened(old, new, Difference(a, b, c, d)):
        for start, end, first, last in _ends(old, new, difference):
            text = new.text[first:last]
            if re.search(r"\.\.\.|\bANY\b", text):
                continue
            yield Splice(start, end, text, _indent_at(new.text, first))
            return
    line = new.tokens[min(run.c, len(new.tokens) - 1)].line
    raise PatchError(f"line {new.number(line)}: neither whole statements nor a part of an expression")


def _moved_and_widened(old: Side, new: Side, difference: Difference) -> Iterator[Difference]:
    """The same difference, seen further to the left where that comes to the same; then with more and more around it."""
    a, b, c, d = difference
    yield difference
    while c < d and a == b and a > 0 and new.tokens[c - 1].text == new.tokens[d - 1].text:
        a, b, c, d = a - 1, b - 1, c - 1, d - 1
        yield Difference(a, b, c, d)
    a, b, c, d = difference
    most = len(old.tokens)
    left = next((i for i in range(min(a, c)) if old.tokens[a - i - 1].text != new.tokens[c - i - 1].text), min(a, c))
    room = min(most - b, len(new.tokens) - d)
    right = next((i for i in range(room) if old.tokens[b + i].text != new.tokens[d + i].text), room)
    for more in range(1, left + right + 1):
        for before in range(max(more - right, 0), min(more, left) + 1):
            yield Difference(a - before, b + more - before, c - before, d + more - before)


def _ends(old: Side, new: Side, difference: Difference) -> Iterator[tuple[Spot, Spot, int, int]]:
    """The nodes between which text is replaced, and where that text starts and ends in the new side."""
    a, b, c, d = difference
    before = _common(old, new, [(start, a) for start in range(a)], c - a)
    after = _common(old, new, [(b, end) for end in range(len(old.tokens), b, -1)], d - b)
    if a == b:
        for node in after:
            if not _binds(node, new.tokens[d - 1].text):
                yield (node, START), (node, START), new.tokens[c].start, new.tokens[d].start
        for node in before:
            if not _binds(node, new.tokens[c].text):
                yield (node, END), (node, END), new.tokens[c - 1].end, new.tokens[d - 1].end
        return
    first_nodes = [old.nodes[a, end] for end in range(b, a, -1) if (a, end) in old.nodes]
    first_nodes += [old.beginning[a]] if a in old.beginning else []
    last_nodes = [old.nodes[start, b] for start in range(a, b) if (start, b) in old.nodes]
    starts = [((node, START), new.tokens[c].start) for node in first_nodes]
    starts += [((node, END), new.tokens[c - 1].end) for node in before]
    ends = [((node, END), new.tokens[d - 1].end) for node in last_nodes]
    ends += [((node, START), new.tokens[d].start) for node in after]
    depth = list(itertools.accumulate((t.text in "([{") - (t.text in ")]}") for t in old.tokens[a:b]))
    if starts and ends and min(depth) >= 0 and depth[-1] == 0:
        (start, first), (end, last) = starts[0], ends[0]
        yield start, end, first, last


def _common(old: Side, new: Side, spans: Sequence[tuple[int, int]], shift: int) -> list[Any]:
    """The nodes with these spans that the new side has too, some tokens further."""
    return [old.nodes[a, b] for a, b in spans if (a, b) in old.nodes and (a + shift, b + shift) in new.nodes]


def _binds(node: Any, token: str) -> bool:
    """Whether a token beside what ``ANY_NAME`` stands for could take a part of it."""
    return isinstance(node, ast.Name) and node.id.startswith("ANY") and _BINDING.fullmatch(token) is not None


def replace(definition: Definition, node: Any, text: str) -> Edit:
    """Put ``text`` in the place of ``node``.

    Here and below the text is dedented, and indented as the node is; a line break at either end of it does not count.
    """
    if isinstance(node, ast.stmt):
        _whole_lines(definition, node)
    return Edit(definition.module.name, *definition.module.span(node), _indented(definition, node, text).lstrip())


def insert_before(definition: Definition, node: Any, text: str) -> Edit:
    """Put the statements ``text`` on lines of their own before the statement ``node``."""
    start, _ = _whole_lines(definition, node)
    return Edit(definition.module.name, start, start, _indented(definition, node, text) + "\n")


def insert_after(definition: Definition, node: Any, text: str) -> Edit:
    """Put the statements ``text`` on lines of their own after the statement ``node``."""
    _, end = _whole_lines(definition, node)
    return Edit(definition.module.name, end, end, _indented(definition, node, text) + "\n")


def delete(definition: Definition, node: Any) -> Edit:
    """Remove the whole lines of the statement ``node`` and the comment lines directly above it."""
    module, (_, end) = definition.module, _whole_lines(definition, node)
    first = first_line(node)
    while module.line(first - 1).strip().startswith("#"):
        first -= 1
    return Edit(module.name, module.starts[first], end, "")


def _whole_lines(definition: Definition, node: Any) -> tuple[int, int]:
    """Where the lines of a statement start and end; raises `UnrecognizedError` if others stand on them too."""
    module = definition.module
    start, end = module.span(node)
    if getattr(node, "decorator_list", None):
        start = module.starts[first_line(node)]
    first, last = module.starts[first_line(node)], module.starts[cast(int, node.end_lineno) + 1]
    if module.text[first:start].strip() or module.text[end:last].partition("#")[0].strip():
        raise unrecognized("a statement on lines of its own", definition, f"`{module.text[first:last].strip()}`")
    return first, last


def _indented(definition: Definition, node: Any, text: str) -> str:
    line = definition.module.line(node.lineno)
    indent = line[: len(line) - len(line.lstrip(" \t"))]
    text = text.removeprefix("\n").removesuffix("\n")
    lines = (textwrap.dedent(text) if text[:1].isspace() else text).split("\n")
    return "\n".join(indent + line if line.strip() else "" for line in lines)
