"""The change of a fix as a diff: what has to be in TransformerEngine's source, and what becomes of it.

A *semantic patch* is text like a unified diff. Its context and ``-`` lines are a pattern
(`te_graph_fixes.patching.matching`), which has to match in a named function or class exactly once::

    @@ graph.py _make_graphed_callables
     visited_te_modules = ANY_EMPTY
    @@ (2 times)
    -range(num_warmup_iters)
    +range(max(num_warmup_iters, 1))

``@@ FILE PLACE (NOTES)`` begins a hunk. The place is a function or class, or one that is defined in it:
``function.Class.method``; without file and place it is that of the hunk before. Notes are

- ``N times``, ``at least once``: how often the pattern matches; ``0 times`` is for what must not be there;
- ``if there``: the place, or what it is in, up to the file, may be missing;
- ``at its start``: for ``+`` lines alone, which go below the docstring;
- ``or``: of this hunk and the one before, exactly one fits.

``+`` lines are inserted below the statement above them or, where that is ``...`` or of another block, above the next
one. After ``-`` lines they take the place of these. Of a line of code only the part that differs is edited, so that
other fixes may change the rest (`rewriting`). ``ANY_NAME`` in ``+`` lines is the text that it has matched.

The result of the ``+`` lines must not be there yet. Where a hunk does not fit, the error names it, and the line of the
patch at which it begins.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from .definition import Definition, UnrecognizedError, unrecognized
from .matching import Pattern, is_gap
from .rewriting import START, Line, PatchError, Replacement, Side, compare, indented, lines_of
from .source import Edit, Source

PYTORCH = "transformer_engine.pytorch"
_HEADER = re.compile(r"@@(?: (?P<file>\S+)\.py (?P<place>[\w.]+))?(?: +\((?P<notes>[^()]*)\))?")
_NOTE = re.compile(r"\d+ times|at least once|if there|at its start|or")


def edits(source: Source, text: str, names: Mapping[str, str] | None = None) -> list[Edit]:
    """The edits of a patch; raises `UnrecognizedError` if a hunk does not fit."""
    for name, value in (names or {}).items():
        text = re.sub(rf"\b{name}\b", value.replace("\\", r"\\"), text)
    return [edit for alternatives in read(text) for edit in _fit(source, alternatives)]


def modules(source: Source, text: str) -> frozenset[str]:
    """The modules that a patch is about, as far as they are there."""
    names = {hunk.module for alternatives in read(text) for hunk in alternatives}
    return frozenset(name for name in names if source.find(name))


def _fit(source: Source, alternatives: Sequence[Hunk]) -> list[Edit]:
    """The edits of the only one of these hunks that fits."""
    fits, errors = [], []
    for hunk in alternatives:
        try:
            fits.append(hunk.fit(source))
        except UnrecognizedError as error:
            errors.append((error, f"{error} (line {hunk.number} of the patch, `{hunk.header}`)"))
    if len(fits) > 1:
        raise UnrecognizedError(f"looked for one of {len(alternatives)} shapes in {hunk.place}, found {len(fits)}")
    if not fits:
        text = "; or ".join(text for _, text in errors)
        raise UnrecognizedError(text, lambda: max(error.closest() for error, _ in errors))
    return fits[0]


@cache
def read(text: str) -> list[list[Hunk]]:
    """The hunks of a patch, each with its alternatives; raises `PatchError` for a line that is not understood."""
    hunks: list[list[Hunk]] = []
    file = place = ""
    for header, lines in _sections(text):
        parts = _HEADER.fullmatch(header.text)
        if not parts or not (parts["file"] or hunks):
            raise PatchError(f"line {header.number}: expected `@@ FILE.py PLACE (NOTES)`, found {header.text!r}")
        if parts["file"]:
            file, place = parts["file"], parts["place"]
        notes = [note.strip() for note in (parts["notes"] or "").split(",") if note]
        if wrong := [note for note in notes if not _NOTE.fullmatch(note)]:
            raise PatchError(f"line {header.number}: {wrong[0]!r} is no note of a hunk")
        if not lines:
            raise PatchError(f"line {header.number}: a hunk without lines")
        hunk = _hunk(header.number, file, place, notes, lines)
        if "or" not in notes:
            hunks.append([hunk])
        elif hunks:
            hunks[-1].append(hunk)
        else:
            raise PatchError(f"line {header.number}: no hunk that this one could stand for")
    return hunks


def _sections(text: str) -> list[tuple[Line, list[Line]]]:
    """The lines that begin hunks, each with the lines of its hunk."""
    sections: list[tuple[Line, list[Line]]] = []
    for number, line in enumerate(textwrap.dedent(text).split("\n"), 1):
        if line.startswith("@@"):
            sections.append((Line("@", line, number), []))
        elif line.strip():
            if not sections or line[0] not in " +-":
                wanted = "a line of a hunk that begins with ' ', '+' or '-'"
                raise PatchError(f"line {number}: expected {wanted}, found {line!r}")
            sections[-1][1].append(Line(line[0], line[1:], number))
    return sections


def _hunk(number: int, file: str, place: str, notes: list[str], lines: list[Line]) -> Hunk:
    """Compile a hunk; raises `PatchError`."""
    is_start = "at its start" in notes
    if is_start != all(line.mark == "+" for line in lines):
        raise PatchError(f"line {number}: `+` lines alone stand `at its start`, and nothing else does")
    counts = [int(note.split()[0]) for note in notes if note.endswith("times")]
    count = None if "at least once" in notes else counts[0] if counts else 1
    old, new = Side(lines, " -", "what the hunk looks for"), Side(lines, " +", "what the hunk makes")
    whole = Pattern(new.module.text, new.body)
    pattern, changes, signs = None, [], [whole]
    if not is_start:
        if not old.body or is_gap(old.body[0]):
            raise PatchError(f"line {number}: a hunk that looks for nothing, or begins with `...`")
        changes = compare(old, new)
        if changes and count == 0:
            raise PatchError(f"line {number}: what must not be there cannot be changed")
        located = frozenset(spot.node for change in changes for spot in (change.start, change.end))
        pattern = Pattern(old.module.text, old.body, located)
        if all(change.whole_lines and change.start == change.end for change in changes):
            signs = [Pattern.of(change.text) for change in changes]
        elif all(line.mark != "+" for line in lines):
            signs = []
    return Hunk(number, file, place, count, "if there" in notes, pattern, changes, signs, new.module.text)


@dataclass(frozen=True)
class Hunk:
    """A hunk: the ``pattern`` that it looks for (None: at the start of a function), and the ``changes`` of a match.

    ``count`` is the number of matches (None: at least one). ``signs`` show that the hunk was applied already: its whole
    new side where it replaces text, each insertion alone where it only inserts, nothing where it only deletes.
    """

    number: int
    file: str
    place: str
    count: int | None
    may_be_missing: bool
    pattern: Pattern | None
    changes: Sequence[Replacement]
    signs: Sequence[Pattern]
    new_text: str

    @property
    def header(self) -> str:
        return f"@@ {self.file}.py {self.place}"

    @property
    def module(self) -> str:
        return f"{PYTORCH}.{self.file.replace('/', '.')}"

    def fit(self, source: Source) -> list[Edit]:
        """The edits where it fits, none if its place is missing and may be; else raises `UnrecognizedError`."""
        definition = self.find(source)
        if definition is None:
            return []
        matches = definition.exactly(self.count, self.pattern) if self.pattern else []
        for sign in self.signs:
            if definition.has(sign):
                raise unrecognized(f"no `{str(sign)[:80]}`", definition, "it already")
        if self.pattern:
            return [change.edit(definition, match) for match in matches for change in self.changes]
        body = definition.node.body
        first = body[1] if len(body) > 1 and ast.get_docstring(definition.node) is not None else body[0]
        start = lines_of(definition, first)[START]
        return [Edit(self.module, start, start, indented(definition.module, first, f"{self.new_text}\n"))]

    def find(self, source: Source) -> Definition | None:
        """The function or class; None where it is not there, and need not be."""
        module, names = source.find(self.module), self.place.split(".")
        depth = 2 if module and isinstance(module.definitions.get(names[0]), ast.ClassDef) else 1
        try:
            definition = source.module(self.module).definition(".".join(names[:depth]))
            for name in names[depth:]:
                definition = definition.inner(name)
        except UnrecognizedError:
            if self.may_be_missing:
                return None
            raise
        return definition
