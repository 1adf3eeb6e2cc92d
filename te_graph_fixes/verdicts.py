"""What a TransformerEngine's source says of every fix, what its version leads one to expect, and what is chosen."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping
from dataclasses import replace

from .engine import EngineError, Installation, changes
from .fix import APPLICABLE, NOT_APPLICABLE, NOT_NEEDED, UNRECOGNIZED, Fix, Verdict
from .fixes import CATALOGUE
from .settings import EXPECT, Settings
from .source import Source, TENotFoundError, without_collections

DISABLED = "disabled"
_COMPARE = {">=": operator.ge, "<": operator.lt}


@without_collections()
def verdicts(source: Source) -> dict[str, Verdict]:
    """The verdict of every fix on ``source``.

    A fix whose feature is absent though the version should have it is ``unrecognized``: the feature may have moved.
    """
    if os.path.isdir(source.location) and not os.path.exists(os.path.join(source.location, "pytorch")):
        nothing = Verdict(NOT_APPLICABLE, "this TransformerEngine is without PyTorch: there is nothing to correct")
        return dict.fromkeys(CATALOGUE, nothing)
    found = {fix.id: fix.verdict(source) for fix in CATALOGUE.values()}
    for fix_id, verdict in found.items():
        if verdict.verdict == NOT_APPLICABLE and _must_be_affected(CATALOGUE[fix_id], source.version):
            reason = f"version {source.version} leads one to expect the defect, found not even its feature"
            found[fix_id] = Verdict(UNRECOGNIZED, f"{reason}: {verdict.reason}")
    return found


def expected(fix: Fix, version: str | None) -> str | None:
    """``applicable`` or ``not-needed``, by the version alone; None for a version that is unknown or not readable.

    Local labels are ignored and a development version counts as the release that it leads to.
    """
    from packaging.version import InvalidVersion, Version  # its specifiers are slow to import

    try:
        release = Version(Version(version or "").base_version)
    except InvalidVersion:
        return None
    bounds = [(sign, Version(bound)) for sign, bound in re.findall(r"(>=|<)([\d.]+)", fix.affected)]
    return APPLICABLE if all(_COMPARE[sign](release, bound) for sign, bound in bounds) else NOT_NEEDED


def _must_be_affected(fix: Fix, version: str | None) -> bool:
    """Whether the version is expected to have the defect; before a release, the release before it too."""
    from packaging.version import Version

    if expected(fix, version) != APPLICABLE:
        return False
    found = Version(version or "")
    return not found.is_prerelease or expected(fix, f"{found.major}.{found.minor - 1}") == APPLICABLE


class Reading:
    """TransformerEngine (TE) as it was read once: the verdicts ``found`` are known, and of them some are ``chosen``.

    ``chosen`` are the verdicts as they are acted upon, and ``installation`` acts upon them. What the settings leave out
    is ``disabled``, what cannot be applied ``unrecognized``. A fix whose requirement is left out is left out too, as
    its requirement is; ValueError, with the names of both, if it was asked for by name and the requirement was not.
    """

    @without_collections()
    def __init__(self, source: Source, settings: Settings, found: Mapping[str, Verdict] | None = None) -> None:
        self.source, self.version, self.settings = source, source.version, settings
        self.found = verdicts(source) if found is None else found
        self.modules = {name for verdict in self.found.values() for name, _ in verdict.rests_on}
        self.targets = {name for verdict in self.found.values() for name in verdict.targets}
        self._refused: dict[str, str] = {}
        self._build()
        source.forget_trees()

    @classmethod
    def installed(cls, settings: Settings, early: Reading | None = None) -> Reading:
        """That of the installed TE, ``early`` if it is; where there is none, it holds no shape that is known."""
        try:
            source = Source.installed()
        except TENotFoundError as error:
            return cls(Source("", None), settings, dict.fromkeys(CATALOGUE, Verdict(UNRECOGNIZED, str(error))))
        return early if early and early.source == source and early.settings is settings else cls(source, settings)

    def _build(self) -> None:
        """Choose, and compile what is chosen: anew without the fixes by which that fails."""
        good = (APPLICABLE, NOT_NEEDED, NOT_APPLICABLE)
        self.chosen = self._choose()
        wanted = {fix_id: verdict for fix_id, verdict in self.chosen.items() if verdict.verdict in good}
        try:
            self.installation = Installation(self.source, wanted)
        except Exception as error:  # one of ours must not reach the import of TE
            self._refused |= self._unbuildable(error)
            self._build()

    def require_live(self) -> None:
        """Choose anew without the fixes whose functions, to be changed or to be left alone, are not what is loaded."""
        while refused := self.installation.replaced():
            self._refused |= refused
            self._build()

    def _choose(self) -> dict[str, Verdict]:
        chosen = dict(self.found)
        for fix_id, verdict in self.found.items():
            if not self.settings.wants(fix_id):
                reason = f"left out by the settings; the source says {verdict.verdict}"
                chosen[fix_id] = replace(verdict, verdict=DISABLED, reason=reason)
            elif fix_id in self._refused:
                chosen[fix_id] = replace(verdict, verdict=UNRECOGNIZED, reason=self._refused[fix_id])
        good = {fix_id for fix_id, found in self.found.items() if found.verdict in (NOT_NEEDED, NOT_APPLICABLE)}
        while unmet := {
            fix_id: required
            for fix_id in _applicable(chosen)
            for required in CATALOGUE[fix_id].requires
            if required not in good and chosen[required].verdict != APPLICABLE
        }:
            for fix_id, required in unmet.items():
                why = chosen[required].verdict
                if self.settings.only is not None and why == DISABLED:
                    raise ValueError(f"{fix_id} requires {required}: one without the other is wrong; name both")
                reason = f"it requires {required}, which is {why}: one without the other is wrong"
                chosen[fix_id] = replace(chosen[fix_id], verdict=why, reason=reason)
        return chosen

    @property
    def to_apply(self) -> dict[str, Verdict]:
        """The fixes that are chosen to be applied."""
        return _applicable(self.chosen)

    def reason(self, fix_id: str) -> str:
        """Why a fix has its verdict; that the version leads one to expect another, where it does."""
        guess, found = expected(CATALOGUE[fix_id], self.version), self.found[fix_id].verdict
        reason = self.chosen[fix_id].reason
        if guess is None or found == UNRECOGNIZED or (found == APPLICABLE) == (guess == APPLICABLE):
            return reason
        return f"{reason}; version {self.version} leads one to expect {guess}; the source decides"

    def _unbuildable(self, error: Exception) -> dict[str, str]:
        """The fixes by which compiling all ended in ``error``, with reasons: those that fail alone, or else all."""
        errors = {}
        for fix_id, verdict in self.to_apply.items():
            try:
                changes(self.source, {fix_id: verdict})
            except Exception as own:
                errors[fix_id] = own
        errors = errors or dict.fromkeys(self.to_apply or self.chosen, error)
        return {fix_id: str(each) if isinstance(each, EngineError) else repr(each) for fix_id, each in errors.items()}


def _applicable(verdicts: Mapping[str, Verdict]) -> dict[str, Verdict]:
    return {fix_id: verdict for fix_id, verdict in verdicts.items() if verdict.verdict == APPLICABLE}


def mismatch(reading: Reading, expected: str) -> str:
    """What is different from the `fingerprint` that is ``expected``, or "" (nothing is, or nothing is expected)."""
    found = fingerprint(reading.version, reading.found)
    theirs, ours = (
        ", ".join(sorted(set(a.split(",")) - set(b.split(",")))) for a, b in ((expected, found), (found, expected))
    )
    if not expected or not theirs + ours:
        return ""
    return (
        f"TransformerEngine here is not that of the other processes: {EXPECT} has {theirs or 'nothing more'}; "
        f"found {ours or 'nothing more'}"
    )


def fingerprint(version: str | None, found: Mapping[str, Verdict]) -> str:
    """The version of TransformerEngine (TE) and the verdicts as one word, to compare TE on many machines by."""
    words = {"te": version or "unknown"} | {fix_id: verdict.verdict for fix_id, verdict in sorted(found.items())}
    return ",".join(f"{name}={word}" for name, word in words.items())
