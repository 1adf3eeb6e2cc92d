"""Compute the edits of a hunk from its two sides.

`compare` groups adjacent lines of a hunk that have the same mark. ``+`` lines replace the ``-`` lines directly above.
If both groups are a single statement of the same type, only the smallest expression that differs is replaced, so that
other fixes can edit the rest of the line, and its comments remain. Each replacement starts and ends at a node of the
pattern. A match binds these nodes to nodes of the source.
"""

import ast
import keyword
import re
import textwrap
from collections.abc import Sequence
from itertools import chain, groupby, takewhile
from typing import Any, NamedTuple

from .matching import Match, as_python, is_gap
from .source import Definition, Edit, ModuleSource, first_line, unrecognized

START, END = 0, 1
"""The edges of a node, as indexes into its span."""
_BLOCKS = ("body", "handlers", "orelse", "finalbody")
_UNKNOWN = re.compile(r"\.\.\.|\bANY\b")


class PatchError(ValueError):
    """A malformed patch. The message names the line in the text of the patch."""


class Line(NamedTuple):
    """A line of a patch. ``mark`` is a blank, ``-``, ``+``, or ``@`` for ``@@``. ``number`` is the line's number."""

    mark: str
    text: str
    number: int

    @property
    def indent(self) -> int:
        return len(self.text) - len(self.text.lstrip())


class Spot(NamedTuple):
    """The start or the end of a node of the pattern. For ``...``, it is the start of the first node in the gap."""

    node: Any
    edge: int


class Side:
    """One side of a hunk: the lines with one of the ``marks``.

    The old side is the pattern, and the new side is its replacement.
    """

    def __init__(self, lines: Sequence[Line], marks: str, name: str) -> None:
        self.lines = [line for line in lines if line.mark in marks]
        self.module = ModuleSource(name, name, as_python("\n".join(line.text for line in self.lines)))
        self.body = self.module.tree.body
        self._statements: list[Any] = [
            node for part in self.body for node in ast.walk(part) if isinstance(node, (ast.stmt, ast.excepthandler))
        ]

    def statements(self, lines: Sequence[Line]) -> list[Any]:
        """Return the statements that start on these lines, or [] if none does."""
        return [node for node in self._statements if self.lines[first_line(node) - 1] in lines]

    def spot(self, edge: int, line: Line, indent: int) -> Spot | None:
        """Return the spot at which a statement with this indent starts or ends on a line, or None if none does."""
        for node in self._statements:
            number = first_line(node) if edge == START else node.end_lineno
            if node.col_offset == indent and self.lines[number - 1] == line and not (is_gap(node) and edge == END):
                return Spot(node.value if isinstance(node, ast.Expr) and not is_gap(node) else node, edge)
        return None

    def text(self, start: int, end: int) -> str:
        """Return the text between two offsets, with the first line's indent removed from the following lines."""
        text = self.module.text
        return text[start:end].replace("\n" + _indent_at(text, start), "\n")


class Replacement(NamedTuple):
    """A replacement of the text between two spots. It covers whole lines if ``whole_lines`` is true."""

    start: Spot
    end: Spot
    text: str
    whole_lines: bool

    def edit(self, definition: Definition, match: Match) -> Edit:
        """Return the edit of the source at a match."""
        module, text = definition.module, self.text
        first, last = match.bound[self.start.node], match.bound[self.end.node]
        if self.whole_lines:
            start, end = lines_of(definition, first)[self.start.edge], lines_of(definition, last)[self.end.edge]
            if self.start != self.end and self.end.edge == START:  # comments belong to the block below them
                end = _start_of_comments(module, last)
            if not text:
                start = _start_of_comments(module, first)
            text = indented(module, first, text)
        else:
            start = span_with_parentheses(module, first)[self.start.edge]
            end = span_with_parentheses(module, last)[self.end.edge]
            text = text.replace("\n", "\n" + _indent_at(module.text, start))
        return Edit(module.name, start, end, _filled(definition, match, text))


def compare(lines: Sequence[Line], old: Side, new: Side) -> list[Replacement]:
    """Return the replacements that turn the ``old`` side into the ``new`` side. Raise `PatchError` on failure."""
    replacements: list[Replacement] = []
    removed: list[Line] = []
    for mark, run in chain(groupby(lines, key=lambda line: line.mark), [(" ", iter(()))]):
        run_lines = [*run]
        if mark == "+" or (mark == " " and removed):
            found = _replace(old, new, removed, run_lines if mark == "+" else [])
            if any(_UNKNOWN.search(replacement.text) for replacement in found):
                raise PatchError(f"line {run_lines[0].number}: `...` and `ANY` have no known text here")
            replacements += found
        removed = run_lines if mark == "-" else []
    return replacements


def _replace(old: Side, new: Side, removed: list[Line], added: list[Line]) -> list[Replacement]:
    """Return the replacements for removed and added lines: parts of one statement if possible, else whole lines."""
    olds, news = old.statements(removed), new.statements(added)
    if len(olds) == len(news) == 1 and not any("#" in line.text for line in added):
        before, after = _difference(olds[0], news[0])
        if isinstance(before, ast.expr):
            return _replace_expression(before, new, after)
        if inserted := _insert_items(before, new, after):
            return inserted
    return [_replace_lines(old, removed, added)]


def _replace_lines(old: Side, removed: list[Line], added: list[Line]) -> Replacement:
    """Return a replacement of whole lines, or an insertion of lines below the previous or above the next statement."""
    changed = removed or added
    first = changed[0]
    above = [line for line in old.lines if line.number <= changed[-1].number]
    below = old.lines[len(above) :]
    end = old.spot(END, above[-1], first.indent) if above else None
    if not end and below:
        end = old.spot(START, below[0], below[0].indent if removed else first.indent)
    start = old.spot(START, first, first.indent) if removed else end
    if not start or not end:
        raise PatchError(f"line {first.number}: no statement of the same block above or below")
    return Replacement(start, end, textwrap.dedent("".join(f"{line.text}\n" for line in added)), True)


def _replace_expression(before: Any, new: Side, after: Any) -> list[Replacement]:
    """Return replacements of an expression, or insertions around it if the new text has ``...`` or ``ANY``."""
    start, end = span_with_parentheses(new.module, after)
    text = new.text(start, end)
    kept = [part for part in ast.walk(after) if _is_same(part, before)]
    if len(kept) != 1 or not _UNKNOWN.search(text):
        return [Replacement(Spot(before, START), Spot(before, END), text, False)]
    kept_start, kept_end = new.module.span(kept[0])
    texts = {START: new.text(start, kept_start), END: new.text(kept_end, end)}
    return [Replacement(Spot(before, edge), Spot(before, edge), text, False) for edge, text in texts.items() if text]


def _insert_items(before: Any, new: Side, after: Any) -> list[Replacement]:
    """Return the replacement, in a list, that adds adjacent items to a `with`, or [] for other differences."""
    if not (isinstance(before, ast.With) and isinstance(after, ast.With)):
        return []
    count, span = len(after.items) - len(before.items), new.module.span
    index = len([*takewhile(bool, map(_is_same, before.items, after.items))])
    if count < 1 or not _is_same(before.items[index:], after.items[index + count :]):
        return []
    if index < len(before.items):
        spot = Spot(before.items[index], START)
        start, end = span(after.items[index])[START], span(after.items[index + count])[START]
    else:
        spot = Spot(before.items[-1], END)
        start, end = span(after.items[index - 1])[END], span(after.items[-1])[END]
    return [Replacement(spot, spot, new.text(start, end), False)]


def _difference(old: Any, new: Any) -> tuple[Any, Any]:
    """Return the smallest expressions that contain all differences of two nodes outside their blocks.

    If no single expression contains them, return the two nodes.
    """
    ignored = () if isinstance(old, ast.expr) else _BLOCKS
    fields = [field for field in old._fields if field not in ignored] if type(old) is type(new) else []
    parts = [pair for field in fields for pair in _paired(getattr(old, field), getattr(new, field))]
    different = [pair for pair in parts if not _is_same(*pair)]
    if len(different) == 1 and all(isinstance(part, (ast.expr, ast.withitem)) for part in different[0]):
        return _difference(*different[0])
    return old, new


def _paired(ours: Any, theirs: Any) -> list[tuple[Any, Any]]:
    """Return pairs of the items of two lists with the same length, or else one pair of both values."""
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [*zip(ours, theirs, strict=True)]
    return [(ours, theirs)]


def _is_same(ours: Any, theirs: Any) -> bool:
    """Return whether two parts of a syntax tree are equal."""
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_is_same, ours, theirs))
    if isinstance(ours, ast.AST) and isinstance(theirs, ast.AST):
        return ast.dump(ours) == ast.dump(theirs)
    return bool(ours == theirs)


def span_with_parentheses(module: ModuleSource, node: Any) -> tuple[int, int]:
    """Return the span of a node, including the parentheses around it, but not the parentheses of a call."""
    text, (start, end) = module.text, module.span(node)
    while text[:start].rstrip()[-1:] == "(" and text[end:].lstrip()[:1] == ")":
        opening = text.rindex("(", 0, start)
        callee = re.search(r"(\w+|[)\]]) *\Z", text[:opening])
        if callee and not keyword.iskeyword(callee[1]):
            break
        start, end = opening, text.index(")", end) + 1
    return start, end


def _indent_at(text: str, offset: int) -> str:
    """Return the indent of the line that contains the character at ``offset``."""
    line = text[text.rfind("\n", 0, offset) + 1 :]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _filled(definition: Definition, match: Match, text: str) -> str:
    """Return ``text`` with each ``ANY_NAME`` replaced by the text that it matched."""
    return re.sub(r"\bANY_\w+", lambda name: definition.text(match.bound[name.group()]), text)


def lines_of(definition: Definition, statement: Any) -> tuple[int, int]:
    """Return the start and end of a statement's lines. Raise `UnrecognizedError` if other code is on them."""
    module, number = definition.module, first_line(statement)
    start, end = module.starts[number], module.starts[statement.end_lineno + 1]
    before, after = module.line(number)[: statement.col_offset], module.text[module.span(statement)[END] : end]
    if before.strip() or after.partition("#")[0].strip():
        raise unrecognized("a statement on lines of its own", definition, f"`{module.text[start:end].strip()}`")
    return start, end


def indented(module: ModuleSource, statement: Any, text: str) -> str:
    """Return ``text`` with the indent of a statement."""
    return textwrap.indent(text, _indent_at(module.text, module.starts[statement.lineno]))


def _start_of_comments(module: ModuleSource, statement: Any) -> int:
    """Return the start of the comments directly above a statement, or of its first line if there are no comments."""
    number = first_line(statement)
    while module.line(number - 1).strip().startswith("#"):
        number -= 1
    return module.starts[number]
