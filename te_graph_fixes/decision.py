"""The steps from TransformerEngine's (TE's) source to the installed fixes.

    read(source)               assesses the source for every fix, and returns each verdict with its reason and edits
    decide(reading, settings)  combines the verdicts with the settings into a status for every fix
    Installation(...)          compiles the fixes to apply. If some fail in this process, `decide` runs once more
    Installation.install()     installs all fixes or none. Only this step changes TE, and `revert` undoes it

``te-graph-fixes status``, ``diff`` and ``bake`` use the first two steps. `activation` uses all of them.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter

from .fix import Assessment
from .fixes import CATALOGUE, assess
from .manifest import BAKE, UNDO, BakeError, Manifest, digest, read_manifest
from .patching.source import Source
from .settings import Settings
from .status import BAKED, CANNOT_APPLY, FixStatus, Report, Status, Verdict
from .text import named


@dataclass(frozen=True)
class Reading:
    """The ``assessments`` of one TE, by fix id, and its ``manifest`` if fixes are baked into its files."""

    source: Source
    assessments: Mapping[str, Assessment]
    manifest: Manifest | None = None

    def in_bake(self, status: Status) -> list[str]:
        """Return the ids of the known fixes that have this ``status`` in the manifest, or [] without a manifest."""
        statuses = self.manifest.fixes if self.manifest else {}
        return [fix_id for fix_id in CATALOGUE if statuses.get(fix_id) == status]


def read(source: Source) -> Reading:
    """Return the `Reading` of a TE, from the manifest if TE is baked, else by matching every fix with the source.

    A fix that the bake disabled is applicable, because TE has the bug. If a bake is not intact, no fix is recognized.
    """
    try:
        manifest = read_manifest(source)
    except BakeError as error:
        return Reading(source, dict.fromkeys(CATALOGUE, Assessment(Verdict.UNRECOGNIZED, str(error))))
    if manifest is None:
        return Reading(source, assess(source))
    when = f"when {manifest.by} baked this TransformerEngine"
    known: dict[str, tuple[Verdict, str]] = {
        Status.APPLIED: (Verdict.NOT_NEEDED, f"{BAKED} {manifest.by}"),
        Status.DISABLED: (Verdict.APPLICABLE, f"disabled {when}"),
        Status.NOT_NEEDED: (Verdict.NOT_NEEDED, f"the source did not have the bug {when}"),
        Status.NOT_APPLICABLE: (Verdict.NOT_APPLICABLE, f"the source lacked the feature {when}"),
    }
    unknown = Verdict.UNRECOGNIZED, f"{manifest.by} baked this TransformerEngine without this fix. Run `{BAKE}`"
    found = {fix_id: Assessment(*known.get(manifest.fixes.get(fix_id, ""), unknown)) for fix_id in CATALOGUE}
    return Reading(source, found, manifest)


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
        """The fixes disabled by the settings although TE needs or may need them, except fixes disabled by a bake."""
        in_bake = self.reading.in_bake(Status.DISABLED)
        return [fix_id for fix_id in self._having(Status.DISABLED) if fix_id not in in_bake]

    @property
    def cannot_apply(self) -> dict[str, str]:
        """The reasons, by id, of the fixes that cannot be applied although TE needs or may need them."""
        return {fix_id: self.fixes[fix_id].reason for fix_id in self._having(*CANNOT_APPLY)}

    @property
    def unusable_reason(self) -> str:
        """The reason why no fix can be applied to this TE, whatever the settings, or "" if there is none."""
        found = {(assessment.verdict, assessment.reason) for assessment in self.reading.assessments.values()}
        verdict, reason = found.pop()
        return reason if verdict == Verdict.UNRECOGNIZED and not found else ""

    @property
    def outdated(self) -> str:
        """A message with the remedy if another version of this package baked the fixes, else ""."""
        return self.reading.manifest.outdated if self.reading.manifest else ""

    def _having(self, *statuses: Status) -> list[str]:
        return [fix_id for fix_id, fix in self.fixes.items() if fix.status in statuses]


def decide(reading: Reading, settings: Settings, failures: Mapping[str, str] | None = None) -> Decision:
    """Return the `Decision` that follows from the verdicts in ``reading`` and from the settings.

    ``failures`` maps the fixes that fail in this process to reasons. Selecting a fix also selects the fixes that it
    requires. Disabling a fix also disables the fixes that require it.
    """
    applicable = {fix_id for fix_id, found in reading.assessments.items() if found.verdict == Verdict.APPLICABLE}
    selected = CATALOGUE.keys() if settings.only is None else settings.only
    wanted = selected | with_required(selected & applicable - settings.disable)
    disabled_in_bake = reading.in_bake(Status.DISABLED)
    failures, fixes = failures or {}, dict[str, FixStatus]()
    for fix_id in TopologicalSorter({fix.id: fix.requires for fix in CATALOGUE.values()}).static_order():
        found = reading.assessments[fix_id]
        status, reason = Status.PENDING if fix_id in applicable else Status(found.verdict.value), found.reason
        if fix_id in failures:
            status, reason = Status.FAILED, failures[fix_id]
        if fix_id in disabled_in_bake:
            status = Status.DISABLED
        elif status in (Status.PENDING, *CANNOT_APPLY) and (fix_id not in wanted or fix_id in settings.disable):
            status, reason = Status.DISABLED, f"disabled by the settings; otherwise {found.verdict}"
        elif status == Status.PENDING:
            required = {name: fixes[name].status for name in CATALOGUE[fix_id].requires}
            if absent := [name for name in required if required[name] in (Status.DISABLED, *CANNOT_APPLY)]:
                status, reason = required[absent[0]], f"requires {absent[0]}, which is {required[absent[0]]}"
        fixes[fix_id] = FixStatus(status, reason, CATALOGUE[fix_id].upstream, found.targets)
    return Decision(reading, settings, {fix_id: fixes[fix_id] for fix_id in CATALOGUE})


def with_required(fix_ids: Collection[str]) -> set[str]:
    """Return the ids of these fixes and of all fixes that they require, directly or through another fix."""
    return set(fix_ids).union(*(with_required(CATALOGUE[fix_id].requires) for fix_id in fix_ids))


def settings_conflict(decision: Decision) -> str:
    """Return a sentence with the differences between the settings and the baked fixes, or "" if they agree.

    The default settings, which neither select nor disable fixes, agree with every bake.
    """
    reading, settings = decision.reading, decision.settings
    if reading.manifest is None or (settings.only is None and not settings.disable):
        return ""
    applied = {*reading.in_bake(Status.APPLIED)}
    bugs = [*applied, *reading.in_bake(Status.DISABLED)]
    before = dict.fromkeys(CATALOGUE, Assessment(Verdict.NOT_NEEDED, ""))
    before |= dict.fromkeys(bugs, Assessment(Verdict.APPLICABLE, ""))
    wanted = decide(Reading(reading.source, before), settings).to_apply.keys()
    if different := sorted(applied ^ wanted):
        conflict = f"they differ from the bake in {named(different)}"
        return f"The settings have no effect on baked fixes until `{UNDO}`: {conflict}."
    return ""


def state_digest(report: Report, manifest: Manifest | None, texts: Iterable[str]) -> str:
    """Return the `Report.digest` of versions, active fixes and changed modules: the manifest's, or else ``texts``."""
    files = [after for _, after in manifest.files.values()] if manifest else [digest(text.encode()) for text in texts]
    state = [report.te_version or "", report.version, *sorted(report.active), *sorted(files)]
    return digest("\n".join(state).encode())[:8]
