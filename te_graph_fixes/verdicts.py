"""What a TransformerEngine's source says of every fix, beside what its version leads one to expect."""

from __future__ import annotations

from collections.abc import Mapping

from .fix import APPLICABLE, NOT_APPLICABLE, NOT_NEEDED, UNRECOGNIZED, Fix, Verdict
from .fixes import CATALOGUE
from .source import Source


def verdicts(source: Source) -> dict[str, Verdict]:
    """The verdict of every fix on ``source``."""
    return {fix.id: fix.verdict(source) for fix in CATALOGUE.values()}


def expected(fix: Fix, version: str | None) -> str | None:
    """``applicable`` or ``not-needed``, by the version alone; None for a version that is unknown or not readable.

    Local labels are ignored and a development version counts as the release that it leads to.
    """
    from packaging.specifiers import SpecifierSet  # slow to import, and of no use to a fix
    from packaging.version import InvalidVersion, Version

    try:
        release = Version(version or "").base_version
    except InvalidVersion:
        return None
    return APPLICABLE if SpecifierSet(fix.affected).contains(release) else NOT_NEEDED


def surprise(fix: Fix, verdict: Verdict, version: str | None) -> str:
    """One sentence where the source says other than the version, "" where they agree."""
    guess = expected(fix, version)
    found = NOT_NEEDED if verdict.verdict == NOT_APPLICABLE else verdict.verdict
    if guess is None or found in (guess, UNRECOGNIZED):
        return ""
    return f"version {version} leads one to expect {guess}; the source decides"


def unmet(fix: Fix, chosen: Mapping[str, Verdict], found: Mapping[str, Verdict]) -> str | None:
    """The id of a fix that ``fix`` requires, and which is neither ``chosen`` nor found not to be needed."""
    for required in fix.requires:
        if required not in chosen and found[required].verdict not in (NOT_NEEDED, NOT_APPLICABLE):
            return required
    return None


def fingerprint(version: str | None, found: Mapping[str, Verdict]) -> str:
    """The version of TransformerEngine (TE) and the verdicts as one word, to compare TE on many machines by."""
    words = {"te": version or "unknown"} | {fix_id: verdict.verdict for fix_id, verdict in sorted(found.items())}
    return ",".join(f"{name}={word}" for name, word in words.items())
