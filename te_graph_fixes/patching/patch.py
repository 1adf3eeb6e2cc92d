"""The change of a fix as a diff: what has to be in TransformerEngine's source, and what becomes of it.

A *semantic patch* is text like a unified diff. Its context and ``-`` lines are a pattern
(`te_graph_fixes.patching.matching`), which has to match in a named place exactly once::

    @@ graph.py _make_graphed_callables
     visited_te_modules = ANY_EMPTY
    @@ (2 times)
    -range(num_warmup_iters)
    +range(max(num_warmup_iters, 1))

``@@ FILE PLACE (NOTES)`` begins a hunk. The place is a function or class, or one that is defined in it:
``function.Class.method``; without a place it is the module, without file and place that of the hunk before. Notes are

- ``N times``, ``at least once``: how often the pattern matches; a pattern that must not match stands ``0 times``;
- ``if there``: the place, or what it is in, up to the file, may be missing;
- ``at its start``: for ``+`` lines alone, which go below the docstring;
- ``or``: of this hunk and the one before, exactly one matches.

``+`` lines are inserted below the statement above them or, where that is ``...`` or of another block, above the next
one. Behind ``-`` lines they take their place. Of a statement only the parts that differ are edited, so that other
fixes may change the rest (`rewriting`). ``ANY_NAME`` in ``+`` lines is the text that it has matched.

What ``+`` lines make must not be there yet. Where a hunk does not fit, the error names it, and the line of the patch
at which it begins.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, TypeVar, cast

from ..fix import Verdict, applicable, not_applicable, not_needed
from ..shipped import new_module
from .matching import Match, Pattern, StatementRun
from .rewriting import Change, Insertion, Line, PatchError, Side, compare
from .source import Definition, Edit, Source, UnrecognizedError, unrecognized

PYTORCH = "transformer_engine.pytorch"
_HEADER = re.compile(r"@@(?: (?P<file>\S+)\.py(?: (?P<place>[\w.]+))?)?(?: +\((?P<notes>[^()]*)\))?")
_NOTE = re.compile(r"\d+ times|at least once|if there|at its start|or")

Found = TypeVar("Found")
Absent = tuple[Callable[[Source], bool], str]
"""Whether a feature is absent, and the reason to give then."""


@dataclass(frozen=True)
class SemanticPatch:
    """The ``examine`` of a `te_graph_fixes.fix.Fix` that is a ``patch``.

    ``corrected`` are upstream's corrections, as patches of context alone, with reasons. ``settled`` is for a correction
    that no patch can say: it returns the reason, or raises `UnrecognizedError`. ``names`` are words of the patch that
    stand for text which depends on the source, here and in ``corrected``; ``provides`` modules of
    `te_graph_fixes.shipped`.
    """

    patch: str
    _: KW_ONLY
    absent: Sequence[Absent] = ()
    corrected: Sequence[tuple[str, str]] = ()
    names: Mapping[str, Callable[[Source], str]] = field(default_factory=dict)
    provides: tuple[str, ...] = ()
    settled: Callable[[Source], str] | None = None

    def check(self) -> None:
        """Compile all its patches; raises `PatchError`."""
        for text in (self.patch, *(text for text, _ in self.corrected)):
            for hunk in (hunk for ways in read(text) for hunk in ways):
                hunk.check()

    def __call__(self, source: Source) -> Verdict:
        for is_absent, reason in self.absent:
            if is_absent(source):
                return not_applicable(reason)
        found, misfit = _attempt(source, self._edits, self.patch)
        tried = [(reason, _attempt(source, self._edits, text)[1]) for text, reason in self.corrected]
        upstream = [reason for reason, error in tried if error is None]
        if len(upstream) > 1 or (upstream and misfit is None):
            raise UnrecognizedError("looked for a defect or one correction, found several of them")
        if upstream:
            return not_needed(upstream[0])
        if misfit is None:
            modules = {name: text for each in self.provides for name, text in new_module(each).items()}
            return applicable("", found or [], modules)
        if self.settled:
            return not_needed(self.settled(source))
        raise UnrecognizedError("; nor is it corrected: ".join(map(str, [misfit, *(error for _, error in tried)])))

    def _edits(self, source: Source, text: str) -> list[Edit]:
        return edits(source, text, {name: find(source) for name, find in self.names.items()})


def _attempt(
    source: Source, find: Callable[..., Found], *arguments: str
) -> tuple[Found | None, UnrecognizedError | None]:
    """What ``find`` returns, or the error that it raised."""
    try:
        return find(source, *arguments), None
    except UnrecognizedError as error:
        return None, error


def edits(source: Source, text: str, names: Mapping[str, str] | None = None) -> list[Edit]:
    """The edits of a patch; raises `UnrecognizedError` if a hunk does not fit, or two edit the same text."""
    for name, value in (names or {}).items():
        text = re.sub(rf"\b{name}\b", value, text)
    found = [(edit, ways[0].number) for ways in read(text) for edit in _fit(source, ways)]
    for (edit, line), (following, other) in pairwise(sorted(found)):
        if edit.module == following.module and edit.end > following.start:
            place = source.module(edit.module).text.count("\n", 0, following.start) + 1
            hunks = f"the hunks at lines {line} and {other} of the patch"
            raise UnrecognizedError(f"{hunks} edit the same text, at line {place} of {edit.module}")
    return [edit for edit, _ in found]


def _fit(source: Source, ways: Sequence[Hunk]) -> list[Edit]:
    """The edits of the only one of these hunks that fits."""
    fits, errors = [], []
    for hunk in ways:
        try:
            fits.append(hunk.fit(source))
        except UnrecognizedError as error:
            errors.append(f"{error} (line {hunk.number} of the patch, `@@ {hunk.file}.py {hunk.place}`)")
    if len(fits) > 1:
        raise UnrecognizedError(f"looked for one of {len(ways)} shapes in {ways[0].place}, found {len(fits)}")
    if not fits:
        raise UnrecognizedError("; or ".join(errors))
    return fits[0]


@cache
def read(text: str) -> list[list[Hunk]]:
    """The hunks of a patch, each with its alternatives; raises `PatchError` for a header or line that is none."""
    hunks: list[list[Hunk]] = []
    file = place = ""
    for header, lines in _sections(text):
        found = _HEADER.fullmatch(header.text)
        if not found or not (found["file"] or hunks):
            raise PatchError(f"line {header.number}: expected `@@ FILE.py PLACE (NOTES)`, found {header.text!r}")
        if found["file"]:
            file, place = found["file"], found["place"] or ""
        notes = [note.strip() for note in (found["notes"] or "").split(",") if note]
        if wrong := [note for note in notes if not _NOTE.fullmatch(note)]:
            raise PatchError(f"line {header.number}: {wrong[0]!r} is no note of a hunk")
        if not lines:
            raise PatchError(f"line {header.number}: a hunk without lines")
        if ("at its start" in notes) != all(line.mark == "+" for line in lines):
            raise PatchError(f"line {header.number}: `+` lines alone stand `at its start`, and nothing else does")
        hunk = Hunk(header.number, file, place, notes, lines)
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


@dataclass(frozen=True)
class Hunk:
    """One hunk, compiled when it is first used; its attributes raise `PatchError`."""

    number: int
    file: str
    place: str
    notes: list[str]
    lines: list[Line]

    def check(self) -> None:
        """Compile it."""
        if not self.start_text:
            self.pattern.nodes  # noqa: B018

    @cached_property
    def old(self) -> Side:
        """What the hunk looks for."""
        side = Side(self.lines, " -", "what the hunk looks for")
        if not side.body:
            raise PatchError(f"line {self.number}: a hunk that looks for nothing")
        return side

    @cached_property
    def new(self) -> Side:
        return Side(self.lines, " +", "what the hunk makes")

    @cached_property
    def pattern(self) -> Pattern:
        text = "\n".join(line.text for line in self.lines if line.mark in " -")
        return Pattern(text, self._parse)

    def _parse(self) -> Sequence[ast.stmt]:
        """What the pattern looks for, in which the changes have marked what they need to know the place of."""
        self.changes  # noqa: B018
        return self.old.body

    @cached_property
    def changes(self) -> Sequence[Change]:
        return compare(self.old, self.new) if any(line.mark != " " for line in self.lines) else []

    @property
    def start_text(self) -> str:
        """The ``+`` lines of a hunk ``(at its start)``; empty for any other."""
        return self.new.added(self.new.body) if "at its start" in self.notes else ""

    @cached_property
    def signs_of_the_result(self) -> list[Pattern]:
        """What shows that the hunk was applied already.

        That is its whole new side where it replaces text, each insertion alone where it only inserts, and nothing where
        it only deletes.
        """
        whole = Pattern("\n".join(line.text for line in self.lines if line.mark in " +"), lambda: self.new.body)
        if "at its start" in self.notes:
            return [whole]
        insertions = [change for change in self.changes if isinstance(change, Insertion)]
        if len(insertions) < len(self.changes) and any(line.mark == "+" for line in self.lines):
            return [whole]
        return [Pattern.of(insertion.text) for insertion in insertions]

    def fit(self, source: Source) -> list[Edit]:
        """The edits where it fits, none if its place is missing and may be; else raises `UnrecognizedError`."""
        place = self._find(source)
        if place is None:
            return []
        is_start = "at its start" in self.notes
        matches = [] if is_start else self._matches(place)
        for pattern in self.signs_of_the_result:
            if place.has(pattern):
                raise unrecognized(f"no `{str(pattern)[:80]}`", place, "it already")
        if is_start:
            return [place.insert_before(_first_statement(place), self.start_text)]
        return [edit for match in matches for change in self.changes for edit in change.edits(place, match)]

    def _find(self, source: Source) -> Definition | None:
        """The function or class; None where it is not there, and need not be."""
        name = f"{PYTORCH}.{self.file.replace('/', '.')}"
        if "if there" in self.notes and source.find(name) is None:
            return None
        module = source.module(name)
        if not self.place:
            return Definition(module, "the module", cast(Any, StatementRun(module.tree.body)))
        outer, *inner = self.place.split(".")
        if inner and (f"\nclass {outer}(" in module.text or f"\nclass {outer}:" in module.text):
            outer = f"{outer}.{inner.pop(0)}"  # a class is looked up with its method
        try:
            found = module.definition(outer)
            for name in inner:
                found = found.inner(name)
        except UnrecognizedError:
            if "if there" in self.notes:
                return None
            raise
        return found

    def _matches(self, place: Definition) -> list[Match]:
        """As many matches as the notes say: at least one, or an exact number."""
        found = place.matches(self.pattern) if "at least once" in self.notes else []
        counts = [int(note.split()[0]) for note in self.notes if note.endswith("times")]
        return found or place.exactly(counts[0] if counts else 1, self.pattern)


def _first_statement(place: Definition) -> ast.stmt:
    """What a function begins with behind its docstring."""
    body = place.node.body
    return body[1] if len(body) > 1 and ast.get_docstring(place.node) is not None else body[0]
