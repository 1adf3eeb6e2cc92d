"""A fix: its catalogue record, and its assessment of a TransformerEngine's source."""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from packaging.version import InvalidVersion, Version

from .patching.installation import Change
from .patching.patch import edits
from .patching.source import Source, UnrecognizedError
from .status import Verdict
from .support import imported_modules

GROUPS = (
    "gradients",
    "FP8 state",
    "pipelines and delayed wgrads",
    "evaluation and checkpoints",
    "crashes",
    "replay preconditions",
    "speed",
)
"""The groups of fixes, sorted by the harm of their bugs. ``te-graph-fixes status`` lists them in this order."""

OLDEST = "2.10"
"""The oldest tested release. No fix is applied to older releases."""


def parsed(version: str | None) -> Version | None:
    """Return ``version`` in a form that can be compared, or None if ``version`` is None or invalid."""
    try:
        return Version(version or "")
    except InvalidVersion:
        return None


@dataclass(frozen=True)
class Assessment(Change):
    """The ``verdict`` of one fix on one source, the ``reason``, and the change if the fix is applicable.

    ``details`` are a longer explanation of why the source is not recognized.
    """

    verdict: Verdict
    reason: str
    details: str = ""

    @property
    def targets(self) -> tuple[str, ...]:
        """The modules that the fix edits or adds."""
        return tuple(sorted({edit.module for edit in self.edits} | set(self.new_modules)))


@dataclass(frozen=True)
class Fix:
    """A record in the catalogue. Each module of `te_graph_fixes.fixes`, except ``shapes``, defines one fix.

    ``symptom`` is one line for ``te-graph-fixes status``. ``affects`` names the affected jobs and the options that
    trigger the bug. ``group`` is one of `GROUPS`. ``cost`` is the cost of the fix, if any. ``since`` is the first
    tested release with the bug, and ``merged`` is the first release with the upstream fix (None: there is none).
    ``requires`` names other fixes. If one of them is disabled or cannot be applied, this fix is not applied. If all
    words of one of the ``check_hints`` fit a mismatch of a check, the check prints this fix as a likely cause.

    ``after`` names the fixes whose edits precede the edits of this fix at the same place. The order of all other edits
    at one place changes only the order of whole statements and of items of a `with` (tests/patching/test_order.py). In
    TransformerEngine 2.10 to 2.20, none of these depends on another.

    ``patch`` is the text of the fix (`te_graph_fixes.patching.patch`). ``absent`` and ``corrected`` are further patches
    that only match and change nothing, each with a reason. A match of ``absent`` means that the source lacks the
    feature. A match of ``corrected`` means that the source contains the upstream fix, or is older than the bug. Edits
    that several fixes share are made once. A fix also adds the support modules that its patch imports.

    ``id`` is the name of the fix's file, with hyphens. ``summary``, the links in ``upstream``, and the ``account`` are
    the paragraphs of that file's docstring (`described_by`).
    """

    symptom: str
    patch: str
    group: str = ""
    affects: str = ""
    cost: str = ""
    since: str = OLDEST
    merged: str | None = None
    requires: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    check_hints: tuple[str, ...] = ()
    absent: Sequence[tuple[str, str]] = ()
    corrected: Sequence[tuple[str, str]] = ()
    id: str = ""
    summary: str = ""
    upstream: tuple[str, ...] = ()
    account: str = ""

    def described_by(self, name: str, docstring: str) -> "Fix":
        """Return this record with the id from its file's ``name`` and the texts from the file's docstring.

        The docstring begins with two paragraphs: ``Bug: ...``, which is the summary, and the upstream links.
        """
        title, upstream, account, *_ = [*docstring.strip().split("\n\n", 2), "", ""]
        return replace(
            self,
            id=name.replace("_", "-"),
            summary=title.removesuffix(".").replace("``", ""),
            upstream=tuple(re.findall(r"https://[\w./-]+\w", upstream)),
            account=account,
        )

    def expected(self, version: str | None) -> Verdict | None:
        """Return the expected verdict (``applicable`` or ``not-needed``), or None if ``version`` is None or invalid."""
        if (found := parsed(version)) is None:
            return None
        is_older = found.release < Version(self.since).release
        is_fixed = self.merged is not None and found.release >= Version(self.merged).release
        return Verdict.NOT_NEEDED if is_older or is_fixed else Verdict.APPLICABLE

    @property
    def versions(self) -> str:
        """The tested releases with the bug, in words: ``2.10 to 2.16`` if ``merged`` is 2.17."""
        last = f"2.{Version(self.merged).minor - 1}" if self.merged else "main"
        return last if last == self.since else f"{self.since} to {last}"

    def assess(self, source: Source) -> Assessment:
        """Return the assessment of a source. Any error, even a bug of this package, makes the fix ``unrecognized``."""
        try:
            return self._assess(source)
        except UnrecognizedError as error:
            return Assessment(Verdict.UNRECOGNIZED, str(error))
        except Exception as error:
            return Assessment(Verdict.UNRECOGNIZED, f"reading the source failed: {type(error).__name__}: {error}")

    def _assess(self, source: Source) -> Assessment:
        """Return the assessment. Raise `UnrecognizedError` if both the patch and a ``corrected`` patch match."""
        for text, reason in self.absent:
            with contextlib.suppress(UnrecognizedError):
                edits(source, text)
                return Assessment(Verdict.NOT_APPLICABLE, reason)
        misfits, upstream_fix = [], ""
        for text, reason in self.corrected:
            try:
                edits(source, text)
                upstream_fix = reason
            except UnrecognizedError as error:
                misfits.append(f"for the upstream fix {reason!r}: {error}")
        try:
            changes = edits(source, self.patch)
        except UnrecognizedError as error:
            if upstream_fix:
                return Assessment(Verdict.NOT_NEEDED, upstream_fix)
            details = "\n".join([f"for the bug: {error}", *misfits])
            return Assessment(Verdict.UNRECOGNIZED, str(error), details=details)
        if upstream_fix:
            raise UnrecognizedError("expected the bug or an upstream fix, but found both")
        new_modules = imported_modules(self.patch)
        return Assessment(
            Verdict.APPLICABLE, self.summary, edits=tuple(changes), new_modules=new_modules, after=self.after
        )
