"""The steps from TransformerEngine's (TE's) source to the installed fixes.

    read(source)               returns a verdict for every fix, from the source only
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

from .fix import OLDEST, Fix, Verdict
from .fixes import CATALOGUE
from .manifest import BAKE, UNDO, Manifest, ManifestError, digest, read_manifest
from .patching.installation import Installation
from .patching.source import Source, TENotFoundError
from .report import Report, named
from .settings import Settings
from .status import BAKED, CANNOT_APPLY, WITHOUT_BUG, Status


@dataclass(frozen=True)
class Reading:
    """The ``verdicts`` for one TE, by fix id, and its ``manifest`` if fixes are baked into its files."""

    source: Source
    verdicts: Mapping[str, Verdict]
    manifest: Manifest | None = None


def read(source: Source) -> Reading:
    """Return the verdicts for a TE. If it is baked, read them from its manifest; else match every fix."""
    try:
        manifest = read_manifest(source)
    except ManifestError as error:
        return _unrecognized(source, str(error))
    if manifest:
        return Reading(source, _baked_verdicts(manifest), manifest)
    return Reading(source, verdicts(source))


def verdicts(source: Source) -> dict[str, Verdict]:
    """Return a verdict for every fix, by matching the fix against the source of a TE."""
    if os.path.isdir(source.location) and not os.path.exists(os.path.join(source.location, "pytorch")):
        return dict.fromkeys(CATALOGUE, Verdict(Status.NOT_APPLICABLE, "this TransformerEngine is without PyTorch"))
    version = _parsed(source.version)
    if version and version.release < Version(OLDEST).release:
        reason = f"version {source.version} is too old ({OLDEST} is the oldest tested); upgrade it, or turn graphs off"
        return dict.fromkeys(CATALOGUE, Verdict(Status.UNRECOGNIZED, reason))
    return {fix.id: _checked_by_version(fix, fix.verdict_on(source), version) for fix in CATALOGUE.values()}


def read_installed() -> Reading:
    """Return the verdicts for the installed TE. If there is no TE, every verdict is ``unrecognized``."""
    try:
        return read(Source.installed())
    except TENotFoundError as error:
        return _unrecognized(Source("", None), str(error))


def _unrecognized(source: Source, reason: str) -> Reading:
    return Reading(source, dict.fromkeys(CATALOGUE, Verdict(Status.UNRECOGNIZED, reason)))


def _checked_by_version(fix: Fix, verdict: Verdict, version: Version | None) -> Verdict:
    """Return the verdict, or ``unrecognized`` if the feature was not found in a version that should have the bug."""
    if verdict.status != Status.NOT_APPLICABLE or version is None or not _must_have_bug(version, fix):
        return verdict
    reason = f"TransformerEngine {version} should have this bug, but its feature was not found: {verdict.reason}"
    return Verdict(Status.UNRECOGNIZED, reason)


def _must_have_bug(version: Version, fix: Fix) -> bool:
    """Return whether a version should have the bug. A pre-release should have it only if the release before has it."""
    before = Version(f"{version.major}.{max(version.minor - 1, 0)}")
    return fix.expected_in(version) and (not version.is_prerelease or fix.expected_in(before))


def _baked_verdicts(manifest: Manifest) -> dict[str, Verdict]:
    when = f"when {manifest.by} baked this TransformerEngine"
    known: dict[str, tuple[Status, str]] = {
        Status.APPLIED: (Status.NOT_NEEDED, f"{BAKED} {manifest.by}"),
        Status.DISABLED: (Status.DISABLED, f"disabled {when}"),
        Status.NOT_NEEDED: (Status.NOT_NEEDED, f"the upstream fix was there {when}"),
        Status.NOT_APPLICABLE: (Status.NOT_APPLICABLE, f"the feature was not there {when}"),
    }
    unknown = Status.UNRECOGNIZED, f"{manifest.by} baked this TransformerEngine without this fix. Run `{BAKE}`"
    return {fix_id: Verdict(*known.get(manifest.fixes.get(fix_id, ""), unknown)) for fix_id in CATALOGUE}


def expected(fix: Fix, version: str | None) -> str | None:
    """Return the verdict that a version implies, ``applicable`` or ``not-needed``; None for an invalid version."""
    if (parsed := _parsed(version)) is None:
        return None
    return Status.APPLICABLE if fix.expected_in(parsed) else Status.NOT_NEEDED


def _parsed(version: str | None) -> Version | None:
    try:
        return Version(version or "")
    except InvalidVersion:
        return None


@dataclass(frozen=True)
class Decision:
    """The status of every fix for one TE and one user's settings.

    ``fixes`` maps each id to a verdict, in which the status takes the settings and the required fixes into account.
    """

    reading: Reading
    settings: Settings
    fixes: Mapping[str, Verdict]

    @property
    def source(self) -> Source:
        return self.reading.source

    @property
    def to_apply(self) -> dict[str, Verdict]:
        return self._with_status(Status.APPLICABLE)

    @property
    def disabled(self) -> dict[str, Verdict]:
        """The fixes disabled by the settings although TE needs or may need them, without those disabled by a bake."""
        disabled = self._with_status(Status.DISABLED)
        return {fix_id: fix for fix_id, fix in disabled.items() if fix != self.reading.verdicts[fix_id]}

    @property
    def cannot_apply(self) -> dict[str, Verdict]:
        """The fixes that cannot be applied although TE needs or may need them."""
        return self._with_status(*CANNOT_APPLY)

    @property
    def unusable_reason(self) -> str:
        """The reason why no fix can be applied to this TE, whatever the settings; "" if there is none."""
        reasons = {verdict.reason for verdict in self.reading.verdicts.values()}
        is_unrecognized = all(verdict.status == Status.UNRECOGNIZED for verdict in self.reading.verdicts.values())
        return reasons.pop() if is_unrecognized and len(reasons) == 1 else ""

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
        """Map each selected fix that is disabled because it requires disabled fixes to the names of those fixes."""
        disabled = self.disabled.keys()
        selected = CATALOGUE.keys() if self.settings.only is None else self.settings.only
        return {
            fix_id: ", ".join(sorted(with_required([fix_id]) & disabled & self.settings.disable))
            for fix_id in sorted(disabled & selected - self.settings.disable)
        }

    def _with_status(self, *statuses: Status) -> dict[str, Verdict]:
        return {fix_id: fix for fix_id, fix in self.fixes.items() if fix.status in statuses}


def decide(reading: Reading, settings: Settings) -> Decision:
    """Combine verdicts and settings into a decision.

    Selecting a fix also selects the fixes that it requires. Disabling a fix also disables the fixes that require it.
    """
    verdicts = reading.verdicts
    order = list(TopologicalSorter({fix.id: fix.requires for fix in CATALOGUE.values()}).static_order())
    disabled: set[str] = set()  # by the settings. These fixes do not select the fixes that they require
    for fix_id in order:
        is_disabled = fix_id in settings.disable or not disabled.isdisjoint(CATALOGUE[fix_id].requires)
        if is_disabled and verdicts[fix_id].status not in WITHOUT_BUG:
            disabled.add(fix_id)
    selected = CATALOGUE.keys() if settings.only is None else settings.only
    wanted = selected | with_required(
        fix_id for fix_id in selected - disabled if verdicts[fix_id].status == Status.APPLICABLE
    )
    fixes: dict[str, Verdict] = {}
    for fix_id in order:
        is_selected = fix_id in wanted and fix_id not in settings.disable
        fixes[fix_id] = _decided(verdicts[fix_id], is_selected, CATALOGUE[fix_id].requires, fixes)
    return Decision(reading, settings, {fix_id: fixes[fix_id] for fix_id in CATALOGUE})


def _decided(verdict: Verdict, is_selected: bool, requires: Iterable[str], decided: Mapping[str, Verdict]) -> Verdict:
    """Return the verdict on one fix with its final status. ``decided`` already contains the fixes it ``requires``."""
    if verdict.status in (*WITHOUT_BUG, Status.DISABLED):
        return verdict
    if not is_selected:
        return replace(verdict, status=Status.DISABLED, reason=f"disabled by the settings; else {verdict.status}")
    if verdict.status != Status.APPLICABLE:
        return verdict
    for required in requires:
        status = decided[required].status
        if status in (Status.DISABLED, *CANNOT_APPLY):
            return replace(verdict, status=status, reason=f"requires {required}, which is {status}")
    return verdict


def with_required(fix_ids: Iterable[str]) -> set[str]:
    """Return the ids of these fixes and of all fixes that they require, directly or through another fix."""
    required, pending = set[str](), list(fix_ids)
    while pending:
        fix_id = pending.pop()
        required.add(fix_id)
        pending += set(CATALOGUE[fix_id].requires) - required
    return required


def settings_conflict(settings: Settings, manifest: Manifest | None) -> str:
    """Return how the settings differ from the baked fixes, as a sentence, or "" if they agree.

    The default settings, which neither select nor disable fixes, agree with every bake.
    """
    if manifest is None or (settings.only is None and not settings.disable):
        return ""
    bugs = {*manifest.applied, *manifest.disabled}
    before = {fix_id: Status.APPLICABLE if fix_id in bugs else Status.NOT_NEEDED for fix_id in CATALOGUE}
    unbaked = Reading(Source("", None), {fix_id: Verdict(status, "") for fix_id, status in before.items()})
    wanted = decide(unbaked, settings).to_apply.keys()
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
    failures = installation.failing_changes()
    if not failures:
        return decision, installation
    verdicts = dict(decision.reading.verdicts)
    for fix_id, reason in failures.items():
        verdicts[fix_id] = replace(verdicts[fix_id], status=Status.FAILED, reason=reason)
    decision = decide(replace(decision.reading, verdicts=verdicts), decision.settings)
    return decision, Installation(decision.source, decision.to_apply)
