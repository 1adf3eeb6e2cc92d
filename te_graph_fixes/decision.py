"""The steps from TransformerEngine's (TE's) source to the installed fixes.

    read(source)               assesses the source for every fix, and returns a verdict with its reason and edits
    decide(reading, settings)  combines the verdicts with the settings into a status for every fix
    compose(decision)          compiles the fixes to apply, except those that fail in this process
    Installation.install()     changes TE, as the only step: installs all fixes or none; `revert` undoes it

``te-graph-fixes status``, ``diff`` and ``bake`` use the first two steps. `activation` uses all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter

from packaging.version import InvalidVersion, Version

from .fix import OLDEST, Assessment, Fix
from .fixes import CATALOGUE
from .manifest import BAKE, UNDO, Manifest, ManifestError, digest, read_manifest
from .patching.installation import Installation
from .patching.source import Source
from .settings import Settings
from .status import BAKED, CANNOT_APPLY, FixStatus, Report, Status, Verdict
from .text import named

_WITHOUT_BUG = (Status.NOT_NEEDED, Status.NOT_APPLICABLE)


@dataclass(frozen=True)
class Reading:
    """The ``assessments`` of one TE, by fix id, and its ``manifest`` if fixes are baked into its files."""

    source: Source
    assessments: Mapping[str, Assessment]
    manifest: Manifest | None = None

    @property
    def disabled_in_bake(self) -> list[str]:
        return self.manifest.disabled if self.manifest else []

    def status_of(self, fix: Fix) -> FixStatus:
        """Return the status of a fix if the settings select it and all fixes that it requires are applied."""
        found = self.assessments[fix.id]
        status = Status.PENDING if found.verdict == Verdict.APPLICABLE else Status(found.verdict.value)
        if fix.id in self.disabled_in_bake:
            status = Status.DISABLED
        return FixStatus(status, found.reason, fix.upstream, found.targets)


def read(source: Source) -> Reading:
    """Assess a TE. If it is baked, read the verdicts from its manifest; else match every fix."""
    try:
        manifest = read_manifest(source)
    except ManifestError as error:
        return Reading(source, dict.fromkeys(CATALOGUE, Assessment(Verdict.UNRECOGNIZED, str(error))))
    if manifest:
        return Reading(source, _baked(manifest), manifest)
    return Reading(source, assess(source))


def assess(source: Source) -> dict[str, Assessment]:
    """Return the assessment of every fix, by matching the fix against the source of a TE."""
    if os.path.isdir(source.location) and not os.path.exists(os.path.join(source.location, "pytorch")):
        without = Assessment(Verdict.NOT_APPLICABLE, "this TransformerEngine is without PyTorch")
        return dict.fromkeys(CATALOGUE, without)
    version = _parsed(source.version)
    if version and version.release < Version(OLDEST).release:
        reason = f"version {source.version} is too old ({OLDEST} is the oldest tested); upgrade it, or turn graphs off"
        return dict.fromkeys(CATALOGUE, Assessment(Verdict.UNRECOGNIZED, reason))
    return {fix.id: _checked_by_version(fix, fix.assess(source), version) for fix in CATALOGUE.values()}


def _checked_by_version(fix: Fix, found: Assessment, version: Version | None) -> Assessment:
    """Return the assessment, but ``unrecognized`` if the feature is missing in a version that should have the bug."""
    if found.verdict != Verdict.NOT_APPLICABLE or version is None or not _must_have_bug(version, fix):
        return found
    reason = f"TransformerEngine {version} should have this bug, but its feature was not found: {found.reason}"
    return Assessment(Verdict.UNRECOGNIZED, reason)


def _must_have_bug(version: Version, fix: Fix) -> bool:
    """Return whether a version should have the bug. A pre-release should have it only if the release before has it."""
    before = Version(f"{version.major}.{max(version.minor - 1, 0)}")
    return fix.expected_in(version) and (not version.is_prerelease or fix.expected_in(before))


def _baked(manifest: Manifest) -> dict[str, Assessment]:
    """Return the verdicts on a baked TE. A fix that its bake disabled is applicable: its bug is there."""
    when = f"when {manifest.by} baked this TransformerEngine"
    known: dict[str, tuple[Verdict, str]] = {
        Status.APPLIED: (Verdict.NOT_NEEDED, f"{BAKED} {manifest.by}"),
        Status.DISABLED: (Verdict.APPLICABLE, f"disabled {when}"),
        Status.NOT_NEEDED: (Verdict.NOT_NEEDED, f"the upstream fix was there {when}"),
        Status.NOT_APPLICABLE: (Verdict.NOT_APPLICABLE, f"the feature was not there {when}"),
    }
    unknown = Verdict.UNRECOGNIZED, f"{manifest.by} baked this TransformerEngine without this fix. Run `{BAKE}`"
    return {fix_id: Assessment(*known.get(manifest.fixes.get(fix_id, ""), unknown)) for fix_id in CATALOGUE}


def expected(fix: Fix, version: str | None) -> Verdict | None:
    """Return the verdict that a version implies, ``applicable`` or ``not-needed``; None for an invalid version."""
    if (parsed := _parsed(version)) is None:
        return None
    return Verdict.APPLICABLE if fix.expected_in(parsed) else Verdict.NOT_NEEDED


def _parsed(version: str | None) -> Version | None:
    try:
        return Version(version or "")
    except InvalidVersion:
        return None


@dataclass(frozen=True)
class Decision:
    """The status of every fix, by its id, for one TE and one user's settings. Fixes to apply are ``pending``."""

    reading: Reading
    settings: Settings
    fixes: Mapping[str, FixStatus]

    @property
    def source(self) -> Source:
        return self.reading.source

    @property
    def to_apply(self) -> dict[str, Assessment]:
        return {fix_id: self.reading.assessments[fix_id] for fix_id in self._having(Status.PENDING)}

    @property
    def disabled(self) -> list[str]:
        """The fixes disabled by the settings although TE needs or may need them, without those disabled by a bake."""
        in_bake = self.reading.disabled_in_bake
        return [fix_id for fix_id in self._having(Status.DISABLED) if fix_id not in in_bake]

    @property
    def cannot_apply(self) -> dict[str, str]:
        """The reasons of the fixes that cannot be applied although TE needs or may need them."""
        return {fix_id: self.fixes[fix_id].reason for fix_id in self._having(*CANNOT_APPLY)}

    @property
    def unusable_reason(self) -> str:
        """The reason why no fix can be applied to this TE, whatever the settings; "" if there is none."""
        found = {(assessment.verdict, assessment.reason) for assessment in self.reading.assessments.values()}
        verdict, reason = found.pop()
        return reason if verdict == Verdict.UNRECOGNIZED and not found else ""

    @property
    def is_outdated(self) -> bool:
        """Whether another version of this package baked the fixes."""
        return self.reading.manifest is not None and self.reading.manifest.outdated != ""

    @property
    def added(self) -> dict[str, str]:
        """Map each fix that is applied only because selected fixes require it to the names of those fixes."""
        named_fixes = sorted(self.settings.only or ())
        required_by = {
            fix_id: [name for name in named_fixes if name in self.to_apply and fix_id in with_required([name])]
            for fix_id in self.to_apply.keys() - set(named_fixes)
        }
        return {fix_id: ", ".join(names) for fix_id, names in sorted(required_by.items()) if names}

    @property
    def dropped(self) -> dict[str, str]:
        """Return {selected fix: the disabled fixes that it requires} for fixes that are not disabled by name."""
        disabled = set(self.disabled)
        selected = CATALOGUE.keys() if self.settings.only is None else self.settings.only
        return {
            fix_id: ", ".join(sorted(with_required([fix_id]) & disabled & self.settings.disable))
            for fix_id in sorted(disabled & selected - self.settings.disable)
        }

    def _having(self, *statuses: Status) -> list[str]:
        return [fix_id for fix_id, fix in self.fixes.items() if fix.status in statuses]


def decide(reading: Reading, settings: Settings, failures: Mapping[str, str] | None = None) -> Decision:
    """Combine verdicts and settings into a decision. ``failures`` are the reasons of fixes that fail in this process.

    Selecting a fix also selects the fixes that it requires. Disabling a fix also disables the fixes that require it.
    """
    fixes = {fix.id: reading.status_of(fix) for fix in CATALOGUE.values()}
    for fix_id, reason in (failures or {}).items():
        fixes[fix_id] = replace(fixes[fix_id], status=Status.FAILED, reason=reason)
    order = list(TopologicalSorter({fix.id: fix.requires for fix in CATALOGUE.values()}).static_order())
    disabled: set[str] = set()  # by the settings. These fixes do not select the fixes that they require
    for fix_id in order:
        is_disabled = fix_id in settings.disable or not disabled.isdisjoint(CATALOGUE[fix_id].requires)
        if is_disabled and fixes[fix_id].status not in _WITHOUT_BUG:
            disabled.add(fix_id)
    selected = CATALOGUE.keys() if settings.only is None else settings.only
    wanted = selected | with_required(
        fix_id for fix_id in selected - disabled if fixes[fix_id].status == Status.PENDING
    )
    for fix_id in order:
        fix = fixes[fix_id]
        if fix.status in (*_WITHOUT_BUG, Status.DISABLED):
            continue
        if fix_id not in wanted or fix_id in settings.disable:
            reason = f"disabled by the settings; else {reading.assessments[fix_id].verdict}"
            fixes[fix_id] = replace(fix, status=Status.DISABLED, reason=reason)
        elif fix.status == Status.PENDING:
            fixes[fix_id] = _with_required_statuses(
                fix, {name: fixes[name].status for name in CATALOGUE[fix_id].requires}
            )
    return Decision(reading, settings, fixes)


def _with_required_statuses(fix: FixStatus, required: Mapping[str, Status]) -> FixStatus:
    """Return the status of a fix to apply, but that of a required fix which is disabled or cannot be applied."""
    for name, status in required.items():
        if status in (Status.DISABLED, *CANNOT_APPLY):
            return replace(fix, status=status, reason=f"requires {name}, which is {status}")
    return fix


def with_required(fix_ids: Iterable[str]) -> set[str]:
    """Return the ids of these fixes and of all fixes that they require, directly or through another fix."""
    required, pending = set[str](), list(fix_ids)
    while pending:
        fix_id = pending.pop()
        required.add(fix_id)
        pending += set(CATALOGUE[fix_id].requires) - required
    return required


def settings_conflict(decision: Decision) -> str:
    """Return how the settings differ from the baked fixes, as a sentence, or "" if they agree.

    The default settings, which neither select nor disable fixes, agree with every bake.
    """
    manifest, settings = decision.reading.manifest, decision.settings
    if manifest is None or (settings.only is None and not settings.disable):
        return ""
    bugs = {*manifest.applied, *manifest.disabled}
    before = {
        fix_id: Assessment(Verdict.APPLICABLE if fix_id in bugs else Verdict.NOT_NEEDED, "") for fix_id in CATALOGUE
    }
    wanted = decide(Reading(decision.source, before), settings).to_apply.keys()
    applied = CATALOGUE.keys() & manifest.applied
    differences = []
    if extra := sorted(applied - wanted):
        differences.append(f"{named(extra)} stay applied")
    if missing := sorted(wanted - applied):
        differences.append(f"{named(missing)} stay disabled")
    if not differences:
        return ""
    return f"The settings have no effect on baked fixes until `{UNDO}`: {' and '.join(differences)}."


def state_digest(report: Report, manifest: Manifest | None, texts: Iterable[str]) -> str:
    """Return the `Report.digest` of a report that lacks it. ``texts`` are the modules that were fixed in memory."""
    files = [after for _, after in manifest.files.values()] if manifest else [digest(text.encode()) for text in texts]
    state = [report.te_version or "", report.version, *sorted(report.active), *sorted(files)]
    return digest("\n".join(state).encode())[:8]


def compose(decision: Decision) -> tuple[Decision, Installation]:
    """Compile the fixes to apply. Return the decision, without the fixes that fail in this process, and the fixes.

    A fix can fail in this process, for example because another package has replaced a function. This affects only the
    fix and the fixes that require it. In contrast, an error here or in a later step is a bug in this package. It
    affects all fixes, and leaves TE unchanged.
    """
    installation = Installation(decision.source, decision.to_apply)
    if failures := installation.failing_changes():
        decision = decide(decision.reading, decision.settings, failures)
        installation = Installation(decision.source, decision.to_apply)
    return decision, installation
