"""What a fix is: its catalogue record, and the verdict that it gives on a TransformerEngine's source."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .patching.source import Edit, Source, UnrecognizedError

APPLICABLE = "applicable"
NOT_NEEDED = "not-needed"
NOT_APPLICABLE = "not-applicable"
UNRECOGNIZED = "unrecognized"

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
    """What a source says of one fix: a ``verdict`` word, the ``reason``, and the change where it is applicable.

    ``new_modules`` maps the full name of a module that the edited source imports to its text; TE does not have it.
    ``fix`` is the fix's id: where several insert at one place, the text of the first id comes first.
    ``stamped`` verdicts come from our stamp, all others from the shape of the source.
    """

    verdict: str
    reason: str
    edits: tuple[Edit, ...] = ()
    new_modules: Mapping[str, str] = field(default_factory=dict)
    fix: str = ""
    stamped: bool = False

    @property
    def targets(self) -> tuple[str, ...]:
        """The modules that the fix changes or adds."""
        return tuple(sorted({edit.module for edit in self.edits} | set(self.new_modules)))


def applicable(reason: str, edits: Sequence[Edit], new_modules: Mapping[str, str] | None = None) -> Verdict:
    """The defect is there and these edits correct it."""
    return Verdict(APPLICABLE, reason, tuple(edits), dict(new_modules or {}))


def not_needed(reason: str) -> Verdict:
    """This TE holds the corrected shape."""
    return Verdict(NOT_NEEDED, reason)


def not_applicable(reason: str) -> Verdict:
    """This TE lacks the feature that has the defect."""
    return Verdict(NOT_APPLICABLE, reason)


@dataclass(frozen=True)
class Fix:
    """One catalogue record.

    ``id`` is the name of its file. ``summary`` and ``upstream``, the links, are what that file's docstring says first
    (`described_by`). ``symptom`` is one line for ``status``.
    ``examine`` reads a `Source` and returns a `Verdict`; it raises `UnrecognizedError` where it finds neither the
    defect nor the corrected shape. ``affected`` are the versions in which one expects the defect: ``>=2.10,<2.17``, or
    one of the two bounds. ``requires`` names fixes that must be applied or not needed for this one to be applied.
    ``check_hints`` says in the words of CONTRIBUTING.md what a check of graphs against eager finds where the defect is.
    ``group`` is one of `GROUPS`. ``users`` are those who have the defect, with the option that leads there.
    ``cost`` is that of the fix alone, if it has any (docs/results/benchmark.md, grad-input-lifetime.md).
    """

    symptom: str
    examine: Callable[[Source], Verdict]
    affected: str = f">={OLDEST}"
    requires: tuple[str, ...] = ()
    check_hints: tuple[str, ...] = ()
    group: str = ""
    users: str = ""
    cost: str = ""
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
        return {bound.operator: Version(bound.version) for bound in SpecifierSet(self.affected)}

    def affects(self, version: Version) -> bool:
        """Whether one expects the defect in the release that a version belongs to."""
        return SpecifierSet(self.affected).contains(version.base_version)

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

    def verdict(self, source: Source) -> Verdict:
        """`examine`, with an unknown shape, and any error of ours on it, turned into the verdict ``unrecognized``.

        The reason why a fix is applicable is its summary, unless `examine` has a better one.
        """
        try:
            found = self.examine(source)
            return replace(found, fix=self.id, reason=found.reason or self.summary)
        except UnrecognizedError as error:
            return Verdict(UNRECOGNIZED, str(error))
        except Exception as error:
            return Verdict(UNRECOGNIZED, f"reading the source failed: {type(error).__name__}: {error}")
