"""Read a semantic patch, and find its edits in TransformerEngine's source.

A *semantic patch* looks like a unified diff. Its context and ``-`` lines are a pattern
(`te_graph_fixes.patching.matching`). The pattern must match exactly once in the named function or class::

    @@ graph.py _make_graphed_callables
     visited_te_modules = ANY_EMPTY
    @@ (2 times)
    -range(num_warmup_iters)
    +range(max(num_warmup_iters, 1))

``@@ FILE PLACE (NOTES)`` begins a hunk. docs/maintainers/adding-a-fix.md describes the notes, and the places at which
``+`` lines are inserted. `rewriting` computes the edits. The error for a hunk that does not fit contains the number of
the hunk's ``@@`` line in the patch.
"""

import ast
import re
import textwrap
from collections.abc import Sequence
from functools import cache

from . import PACKAGE
from .matching import Pattern, is_gap
from .rewriting import START, Line, PatchError, Replacement, Side, compare, indented, lines_of
from .source import Definition, Edit, Source, UnrecognizedError, unrecognized

_NOTE = r"(?:\d+ times|at least once|if there|at its start|or)"
_HEADER = re.compile(rf"@@(?: (?P<file>\S+)\.py (?P<place>[\w.]+))?(?: \((?P<notes>{_NOTE}(?:, {_NOTE})*)\))?")


def edits(source: Source, text: str) -> list[Edit]:
    """Return the edits of a patch. Raise `UnrecognizedError` if a hunk does not fit."""
    return [edit for alternatives in read(text) for edit in _fit(source, alternatives)]


def _fit(source: Source, alternatives: "Sequence[Hunk]") -> list[Edit]:
    """Return the edits of the only fitting hunk. Raise `UnrecognizedError` unless exactly one hunk fits."""
    fits, errors = [], []
    for hunk in alternatives:
        try:
            fits.append(hunk.fit(source))
        except UnrecognizedError as error:
            errors.append(f"{error} (line {hunk.number} of the patch)")
    if len(fits) > 1:
        place = alternatives[-1].place
        raise UnrecognizedError(f"looked for exactly one of {len(alternatives)} hunks in {place}, found {len(fits)}")
    if not fits:
        raise UnrecognizedError("; or ".join(errors))
    return fits[0]


@cache
def read(text: str) -> "list[list[Hunk]]":
    """Return the hunks of a patch, each in a list with its alternatives. Raise `PatchError` for an invalid line."""
    hunks: list[list[Hunk]] = []
    file = place = ""
    for header, lines in _sections(text):
        parts = _HEADER.fullmatch(header.text)
        if not parts or not (parts["file"] or hunks):
            raise PatchError(f"line {header.number}: expected `@@ FILE.py PLACE (NOTES)`, found {header.text!r}")
        if parts["file"]:
            file, place = parts["file"], parts["place"]
        notes = (parts["notes"] or "").split(", ")
        hunk = Hunk(header.number, file, place, notes, lines)
        if "or" in notes:
            hunks[-1].append(hunk)
        else:
            hunks.append([hunk])
    return hunks


def _sections(text: str) -> list[tuple[Line, list[Line]]]:
    """Split a patch at its ``@@`` lines. Return pairs of an ``@@`` line and the lines of its hunk."""
    sections: list[tuple[Line, list[Line]]] = []
    for number, line in enumerate(textwrap.dedent(text).split("\n"), 1):
        if line.startswith("@@"):
            sections.append((Line("@", line, number), []))
        elif line.strip():
            if not sections or line[0] not in " +-":
                raise PatchError(f"line {number}: expected a line that begins with ' ', '+' or '-', found {line!r}")
            sections[-1][1].append(Line(line[0], line[1:], number))
    return sections


class Hunk:
    """A hunk: its ``pattern`` (None: insert at the start of a function), and the ``changes`` at each match.

    ``count`` is the required number of matches (None: at least one). ``result`` is the new side as a pattern (None: the
    hunk has no ``+`` lines). If ``result`` matches, the source already contains the hunk.
    """

    def __init__(self, number: int, file: str, place: str, notes: list[str], lines: list[Line]) -> None:
        """Read the lines of the hunk. Raise `PatchError` for an invalid pattern."""
        self.number, self.file, self.place = number, file, place
        self.may_be_missing = "if there" in notes
        counts = [int(note.split()[0]) for note in notes if note.endswith("times")]
        self.count = None if "at least once" in notes else counts[0] if counts else 1
        old, new = Side(lines, " -", "the old side"), Side(lines, " +", "the new side")
        self.new_text = new.module.text
        self.pattern, self.changes = None, list[Replacement]()
        if "at its start" not in notes:
            if not old.body or is_gap(old.body[0]):
                raise PatchError(f"line {number}: a pattern must not be empty or begin with `...`")
            self.changes = compare(lines, old, new)
            located = frozenset(spot.node for change in self.changes for spot in (change.start, change.end))
            self.pattern = Pattern(old.module.text, old.body, located)
        self.result = Pattern(new.module.text, new.body) if any(line.mark == "+" for line in lines) else None

    def fit(self, source: Source) -> list[Edit]:
        """Return the edits of the hunk. Raise `UnrecognizedError` if it does not fit.

        Return no edits if the place of the hunk is missing and the notes allow this (``if there``).
        """
        definition = self.find(source)
        if definition is None:
            return []
        matches = definition.exactly(self.count, self.pattern) if self.pattern else []
        if self.result and definition.matches(self.result):
            raise unrecognized(f"no `{self.result}`", definition, "it already")
        if self.pattern:
            return [change.edit(definition, match) for match in matches for change in self.changes]
        body = definition.node.body
        first = body[1] if len(body) > 1 and ast.get_docstring(definition.node) is not None else body[0]
        start = lines_of(definition, first)[START]
        text = indented(definition.module, first, f"{self.new_text}\n")
        return [Edit(definition.module.name, start, start, text)]

    def find(self, source: Source) -> Definition | None:
        """Return the function or class of the hunk, or None if it is missing and the notes allow this."""
        module = f"{PACKAGE}.{self.file.replace('/', '.')}"
        try:
            return source.module(module).definition(self.place)
        except UnrecognizedError:
            if self.may_be_missing:
                return None
            raise
