"""What a TransformerEngine's source says of every fix, what its version leads one to expect, and what is chosen."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property

from packaging.version import InvalidVersion, Version

from .fix import OLDEST, Fix, Verdict
from .fixes import CATALOGUE
from .patching.installation import Installation, InstallationError, changed_since_import
from .patching.source import Source, TENotFoundError, without_collections
from .report import by_reason, named
from .settings import COMMAND, Settings, option
from .stamp import LEFT_OUT, MADE, ChangedStampError, Stamp, is_baked, of_source, undoing
from .status import ON_DISK, REFUSED, Status

_WITHOUT_DEFECT = (Status.NOT_NEEDED, Status.NOT_APPLICABLE)
_WELL = (Status.APPLICABLE, *_WITHOUT_DEFECT)


@without_collections()
def verdicts(source: Source) -> dict[str, Verdict]:
    """The verdict of every fix on ``source``.

    Where the version is known and older than `OLDEST`, every fix is ``unrecognized``. So is one whose feature is absent
    though the version should have it: the feature may have moved.
    """
    if os.path.isdir(source.location) and not os.path.exists(os.path.join(source.location, "pytorch")):
        nothing = Verdict(
            Status.NOT_APPLICABLE, "this TransformerEngine is without PyTorch: there is nothing to correct"
        )
        return dict.fromkeys(CATALOGUE, nothing)
    if stamped := on_disk(source):
        return stamped
    version = _parsed(source.version)
    if version and version.release < Version(OLDEST).release:
        advice = "upgrade it, or switch graphs off"
        reason = f"version {source.version} is older than {OLDEST}, the oldest that is tested: {advice}"
        return dict.fromkeys(CATALOGUE, Verdict(Status.UNRECOGNIZED, reason))
    return {fix.id: _checked(fix, fix.verdict_on(source), version) for fix in CATALOGUE.values()}


def _checked(fix: Fix, verdict: Verdict, version: Version | None) -> Verdict:
    """The verdict, unless it says that a version lacks a feature which it should have."""
    if verdict.status != Status.NOT_APPLICABLE or version is None or not _must_have_defect(version, fix):
        return verdict
    reason = f"TransformerEngine {version} should have this defect, but its feature was not found: {verdict.reason}"
    return Verdict(Status.UNRECOGNIZED, reason)


def on_disk(source: Source) -> dict[str, Verdict] | None:
    """The verdicts on a TransformerEngine that this package has corrected on disk; None: it has not."""
    try:
        stamp = of_source(source)
    except ChangedStampError as error:
        return dict.fromkeys(CATALOGUE, Verdict(Status.UNRECOGNIZED, str(error)))
    if stamp is None:
        return None
    when, undo = f"when {stamp.by} corrected the rest on disk", undoing(source)
    known = {
        MADE: (Status.NOT_NEEDED, f"{ON_DISK} by {stamp.by}"),
        LEFT_OUT: (Status.DISABLED, f"left out {when}: to have it, {undo}, then bake with it"),
        Status.NOT_NEEDED: (Status.NOT_NEEDED, f"upstream's correction was there {when}"),
        Status.NOT_APPLICABLE: (Status.NOT_APPLICABLE, f"the feature was not there {when}"),
    }
    advice = f"bake again with `{COMMAND} bake{option(source)}`" if stamp.is_outdated and is_baked(source) else undo
    unknown = Status.UNRECOGNIZED, f"{advice}: it was not corrected {when}"
    reasons = {fix_id: known.get(stamp.fixes.get(fix_id, ""), unknown) for fix_id in CATALOGUE}
    modules = frozenset(path.removesuffix(".py").replace("/", ".") for path in stamp.files)
    return {
        fix_id: Verdict(state, reason, rests_on=modules, stamped=True) for fix_id, (state, reason) in reasons.items()
    }


def disagreement(settings: Settings, corrected: tuple[Source, Stamp] | None) -> str:
    """How settings differ from the fixes in a ``corrected`` TransformerEngine, and what to do; "" where they do not.

    Settings that name no fix ask for none but those.
    """
    if corrected is None or (settings.only is None and not settings.disable):
        return ""
    source, stamp = corrected
    made = set(stamp.made)
    decided = {fix_id for fix_id, word in stamp.fixes.items() if word in (MADE, LEFT_OUT)}
    wanted = set(filter(settings.wants, decided))
    if settings.with_required:
        wanted = wanted.union(*map(with_required, wanted & CATALOGUE.keys())) & decided - settings.disable
    known = wanted & CATALOGUE.keys()
    wanted -= {fix_id for fix_id in known if with_required(fix_id) & decided & settings.disable}
    said = []
    if extra := sorted(made - wanted):
        said.append(f"hold {named(extra)}, which the settings leave out")
    if missing := sorted(wanted - made):
        said.append(f"lack {named(missing)}, which the settings ask for")
    return f"{undoing(source)}: they {' and '.join(said)}" if said else ""


def expected(fix: Fix, version: str | None) -> str | None:
    """``applicable`` or ``not-needed``, by the version alone; None for a version that is unknown or not readable."""
    if (parsed := _parsed(version)) is None:
        return None
    return Status.APPLICABLE if fix.expected_in(parsed) else Status.NOT_NEEDED


def _parsed(version: str | None) -> Version | None:
    try:
        return Version(version or "")
    except InvalidVersion:
        return None


def _must_have_defect(version: Version, fix: Fix) -> bool:
    """Whether one expects the defect; before a release, in the release before it too."""
    before = Version(f"{version.major}.{max(version.minor - 1, 0)}")
    return fix.expected_in(version) and (not version.is_prerelease or fix.expected_in(before))


class Decision:
    """What to do with one TransformerEngine (TE), which is read once: of each fix the verdict, and the decision.

    ``verdicts`` are those of the source, ``decisions`` the same as they are acted upon, ``installation`` acts upon
    them. What the settings leave out is ``disabled``, what cannot be put together with the rest ``failed``, as are the
    ``failures``, fixes with reasons. A fix is never applied without what it requires; ValueError, with the names of
    both, if it was asked for by name and the requirement was not.
    """

    @without_collections()
    def __init__(
        self,
        source: Source,
        settings: Settings,
        verdicts_: Mapping[str, Verdict] | None = None,
        failures: Mapping[str, str] | None = None,
    ) -> None:
        self.version, self.settings = source.version, settings
        self.verdicts = verdicts(source) if verdicts_ is None else verdicts_
        self.targets = {name for verdict in self.verdicts.values() for name in verdict.targets}
        self.failures = dict(failures or {})
        self.decisions, self.installation = self._build(source)
        self.source = source.without_trees()

    @classmethod
    def installed(cls, settings: Settings, early: Decision | None = None) -> Decision:
        """That of the installed TE, ``early`` if it is; where there is none, it holds no shape that is known."""
        try:
            source = Source.installed()
        except TENotFoundError as error:
            return cls(Source("", None), settings, dict.fromkeys(CATALOGUE, Verdict(Status.UNRECOGNIZED, str(error))))
        return early if early and early.source == source else cls(source, settings)

    def _build(self, source: Source) -> tuple[dict[str, Verdict], Installation]:
        """The decisions, and what puts them in place: without the fixes that cannot be compiled together."""
        wanted = self._wanted()
        while True:
            decisions = {fix_id: self._decide(fix_id, wanted) for fix_id in self.verdicts}
            try:
                return decisions, Installation(source, _applicable(decisions))
            except InstallationError as error:
                self.failures |= error.reasons
            except Exception as error:  # one of ours must not reach the import of TE
                self.failures |= _failing_alone(source, decisions) or dict.fromkeys(_applicable(decisions), repr(error))

    def install(self, compare: bool) -> Decision:
        """Put in place what can be; the decision as it is then.

        With ``compare``, what is not needed by TE's files has to be loaded as they say.
        """
        failures = self._of_changed_files() if compare else {}
        try:
            if not failures:
                self.installation.install()
                return self
        except InstallationError as error:
            failures = error.reasons
        return Decision(self.source, self.settings, self.verdicts, self.failures | failures).install(False)

    def _of_changed_files(self) -> dict[str, str]:
        """The fixes that are not needed by TE's files, while other ones are loaded; with reasons."""
        not_needed = {
            fix_id: verdict for fix_id, verdict in self.decisions.items() if verdict.status == Status.NOT_NEEDED
        }
        changed = changed_since_import(
            self.source, {name for verdict in not_needed.values() for name in verdict.rests_on}
        )
        failures = {}
        for fix_id, verdict in not_needed.items():
            if names := sorted(changed & verdict.rests_on):
                failures[fix_id] = (
                    "start the process again, without TransformerEngine's bytecode (__pycache__): "
                    f"{', '.join(names)} was imported from other files than are there now"
                )
        return failures

    def _wanted(self) -> set[str]:
        """The fixes that the settings ask for, some of them by what others require."""
        wanted = set(filter(self.settings.wants, CATALOGUE))
        if self.settings.with_required:
            wanted = wanted.union(*map(with_required, wanted & _applicable(self.verdicts).keys()))
        return wanted - self.settings.disable

    def _decide(self, fix_id: str, wanted: Collection[str]) -> Verdict:
        """The verdict on a fix, unless it is left out, has failed, or goes without what it requires."""
        verdict = self.verdicts[fix_id]
        if verdict.stamped and verdict.status not in REFUSED and fix_id not in self.failures:
            return verdict
        if fix_id not in wanted:
            reason = f"left out by the settings ({verdict.status} without them)"
            return replace(verdict, status=Status.DISABLED, reason=reason)
        if fix_id in self.failures:
            return replace(verdict, status=Status.FAILED, reason=self.failures[fix_id])
        for required in CATALOGUE[fix_id].requires if verdict.status == Status.APPLICABLE else ():
            state, by_source = self._decide(required, wanted).status, self.verdicts[required].status
            if state in _WELL or (state == Status.DISABLED and by_source in _WITHOUT_DEFECT):
                continue
            if state == Status.DISABLED:
                self._require_chosen(fix_id, required)
            reason = f"it requires {required}, which is {state}: one without the other is wrong"
            return replace(verdict, status=state, reason=reason)
        return verdict

    def _require_chosen(self, fix_id: str, required: str) -> None:
        """Raise ValueError if the settings name a fix without what it requires."""
        settings = self.settings
        if settings.only is not None and not settings.with_required:
            whole = ",".join(sorted(set().union(*map(with_required, settings.only))))
            advice = f"leave {required} enabled" if required in settings.disable else f"write {whole}"
            raise ValueError(f"{fix_id} requires {required}: one without the other is wrong; {advice}")

    @cached_property
    def stamp(self) -> Stamp | None:
        """That of a TE which this package has corrected on disk; None where it has not, or it was changed since."""
        is_stamped = any(verdict.stamped for verdict in self.verdicts.values())
        return of_source(self.source) if is_stamped else None

    @property
    def is_outdated(self) -> bool:
        """Whether the fixes of another te-graph-fixes are on disk, and this one's are to take their place."""
        return self.stamp is not None and self.stamp.is_outdated

    @property
    def disagreement(self) -> str:
        """How the settings differ from the fixes that are on disk; "" where they do not."""
        return disagreement(self.settings, (self.source, self.stamp) if self.stamp else None)

    @property
    def left_out(self) -> list[str]:
        """The fixes that the settings leave out though this TE may need them."""
        needed = [fix_id for fix_id, verdict in self.verdicts.items() if verdict.status not in _WITHOUT_DEFECT]
        left_out = [fix_id for fix_id in needed if self.decisions[fix_id].status == Status.DISABLED]
        return [fix_id for fix_id in left_out if fix_id not in self.left_out_on_disk]

    @property
    def left_out_on_disk(self) -> list[str]:
        """The fixes that a bake left out on purpose."""
        by_stamp = {fix_id: verdict for fix_id, verdict in self.verdicts.items() if verdict.stamped}
        return [fix_id for fix_id, verdict in by_stamp.items() if verdict.status == Status.DISABLED]

    @property
    def refused(self) -> dict[str, list[str]]:
        """The fixes that cannot be applied, by reason."""
        refused = {fix_id: verdict for fix_id, verdict in self.decisions.items() if verdict.status in REFUSED}
        return by_reason({fix_id: verdict.reason for fix_id, verdict in refused.items()})

    @property
    def why_none(self) -> str:
        """Why no fix at all can be applied, whatever the settings are; "" where some can."""
        (state, reason), *others = {(verdict.status, verdict.reason) for verdict in self.verdicts.values()}
        return reason if state == Status.UNRECOGNIZED and not others else ""

    @property
    def to_apply(self) -> dict[str, Verdict]:
        """The fixes that are chosen to be applied."""
        return _applicable(self.decisions)


def with_required(fix_id: str) -> set[str]:
    """A fix with all that it requires, and that these require."""
    return {fix_id}.union(*map(with_required, CATALOGUE[fix_id].requires))


def _applicable(verdicts: Mapping[str, Verdict]) -> dict[str, Verdict]:
    return {fix_id: verdict for fix_id, verdict in verdicts.items() if verdict.status == Status.APPLICABLE}


def _failing_alone(source: Source, verdicts_: Mapping[str, Verdict]) -> dict[str, str]:
    """The fixes that cannot be compiled by themselves, with reasons."""
    failures = {}
    for fix_id, verdict in _applicable(verdicts_).items():
        try:
            Installation(source, {fix_id: verdict})
        except Exception as error:
            failures[fix_id] = repr(error)
    return failures
