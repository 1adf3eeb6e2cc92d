"""What a fix is: its catalogue record, and the verdict that it gives on a TransformerEngine's source."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .patching.patch import edits, modules
from .patching.source import Edit, Source, UnrecognizedError
from .shipped import new_module
from .status import Status

GROUPS = (
    "gradients",
    "FP8 state",
    "pipelines and delayed wgrads",
    "evaluation and checkpoints",
    "crashes",
    "misuse",
    "speed",
)
"""What a defect hurts: the groups of `Fix`, in the order in which ``te-graph-fixes status`` has them."""

OLDEST = "2.10"
"""The oldest release that is tested: nothing is applied to those before it."""


@dataclass(frozen=True)
class Verdict:
    """What a source says of one fix: its ``status``, the ``reason``, and the change where it is applicable.

    ``new_modules`` maps the full name of a module that the edited source imports to its text; TE does not have it.
    ``rests_on`` are the modules that show that the fix is not needed.
    ``details`` say at length why a source is not recognized. ``stamped``: by our stamp, not by the source's shape.
    """

    status: Status
    reason: str
    edits: tuple[Edit, ...] = ()
    new_modules: Mapping[str, str] = field(default_factory=dict)
    rests_on: frozenset[str] = frozenset()
    details: str = ""
    stamped: bool = False

    @property
    def targets(self) -> tuple[str, ...]:
        """The modules that the fix changes or adds."""
        return tuple(sorted({edit.module for edit in self.edits} | set(self.new_modules)))


@dataclass(frozen=True)
class Fix:
    """One catalogue record: the catalogue has one for each module of `te_graph_fixes.fixes`.

    ``symptom`` is one line for ``te-graph-fixes status``. ``affects`` names the affected jobs and the options that lead
    there. ``group`` is one of `GROUPS`. ``cost`` is the cost of this fix, if it has any (docs/results/single-fixes.md).
    ``affected_versions`` are the versions expected to have the bug: ``>=2.10,<2.17``, or one of the two bounds. ``requires`` names fixes that must be applied or not needed for this one to be applied.
    ``check_hints`` says in the words of CONTRIBUTING.md what a check of graphs against eager meets where the defect is.

    ``patch`` is the change (`te_graph_fixes.patching.patch`). ``absent`` says which sources lack the public feature,
    ``corrected`` which hold upstream's correction, both as patches of context alone, with reasons. In these texts
    ``names`` are words that stand for others, which depend on the source. ``provides`` are the modules of
    `te_graph_fixes.shipped` that the corrected text imports.

    ``id`` is the name of its file, ``summary`` and ``upstream``, the links, are the beginning of that file's docstring
    (`described_by`).
    """

    symptom: str
    patch: str
    group: str = ""
    affects: str = ""
    cost: str = ""
    affected_versions: str = f">={OLDEST}"
    requires: tuple[str, ...] = ()
    check_hints: tuple[str, ...] = ()
    absent: Sequence[tuple[str, str]] = ()
    corrected: Sequence[tuple[str, str]] = ()
    names: Mapping[str, Callable[[Source], str]] = field(default_factory=dict)
    provides: tuple[str, ...] = ()
    id: str = ""
    summary: str = ""
    upstream: tuple[str, ...] = ()

    def described_by(self, name: str, docstring: str) -> Fix:
        """This record with its id, from the ``name`` of its file, and what the first two paragraphs there say.

        They are ``ID: summary.``, and upstream's links.
        """
        title, upstream, *_ = [*docstring.split("\n\n"), "", ""]
        summary = title.partition(": ")[2].removesuffix(".").replace("``", "")
        links = re.findall(r"https://[\w./-]+\w", upstream)
        return replace(self, id=name.replace("_", "-"), summary=summary, upstream=tuple(links))

    @property
    def _bounds(self) -> dict[str, Version]:
        """The first release with the defect, by ``>=``, and the first without it again, by ``<``."""
        return {bound.operator: Version(bound.version) for bound in SpecifierSet(self.affected_versions)}

    def expected_in(self, version: Version) -> bool:
        """Whether one expects the defect in the release that a version belongs to."""
        return SpecifierSet(self.affected_versions).contains(version.base_version)

    @property
    def versions(self) -> str:
        """The releases with the defect from 2.10 on, in words: ``2.10 to 2.16`` for ``>=2.10,<2.17``."""
        oldest = Version(OLDEST)
        first = str(max(self._bounds.get(">=", oldest), oldest))
        corrected = self._bounds.get("<")
        last = f"{corrected.major}.{corrected.minor - 1}" if corrected else "main"
        return first if first == last else f"{first} to {last}"

    @property
    def merged(self) -> str | None:
        """The first release that holds upstream's correction; None where upstream is open."""
        return str(self._bounds["<"]) if "<" in self._bounds else None

    def verdict_on(self, source: Source) -> Verdict:
        """The verdict on a source: an unknown shape is ``unrecognized``, an error of ours ``failed``."""
        try:
            try:
                return self._verdict_on(source)
            except UnrecognizedError as error:
                return Verdict(Status.UNRECOGNIZED, error.closest().text, details=error.details)
        except Exception as error:
            return Verdict(Status.FAILED, f"reading the source failed: {type(error).__name__}: {error}")

    def _verdict_on(self, source: Source) -> Verdict:
        """Raises `UnrecognizedError` unless the source has the defect or one correction, or lacks the feature."""
        for text, reason in self.absent:
            with contextlib.suppress(UnrecognizedError):
                self._edits(source, text)
                return Verdict(Status.NOT_APPLICABLE, reason)
        misfits, corrections = [], []
        for text, reason in self.corrected:
            try:
                self._edits(source, text)
                corrections.append(Verdict(Status.NOT_NEEDED, reason, rests_on=modules(source, text)))
            except UnrecognizedError as error:
                misfits.append((f"for the correction {reason!r}", error))
        if len(corrections) > 1:
            raise UnrecognizedError("looked for the defect or one correction, found several corrections")
        try:
            changes = self._edits(source, self.patch)
        except UnrecognizedError as error:
            if corrections:
                return corrections[0]
            lines = [f"{what}: {miss.closest().text}\n  {miss}" for what, miss in (("for the defect", error), *misfits)]
            raise UnrecognizedError(str(error), error.closest, "\n".join(lines)) from error
        if corrections:
            raise UnrecognizedError("looked for the defect or a correction, found both")
        new_modules = {name: text for module in self.provides for name, text in new_module(module).items()}
        return Verdict(Status.APPLICABLE, self.summary, tuple(changes), new_modules)

    def _edits(self, source: Source, text: str) -> list[Edit]:
        return edits(source, text, {name: text_for(source) for name, text_for in self.names.items()})
