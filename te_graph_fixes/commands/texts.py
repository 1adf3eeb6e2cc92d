"""The texts and the JSON data of ``te-graph-fixes status``, ``explain`` and ``list``.

The texts contain commands. The argument ``where`` is the option that these commands need to find TransformerEngine
(TE): `` --source DIR``, with the leading space, or "" for the installed TE.
"""

import itertools
import re
from collections.abc import Iterator
from typing import Any

from ..decision import Decision, settings_conflict, with_required
from ..fix import GROUPS, Fix
from ..fixes import CATALOGUE
from ..fixes.shapes import REPLAY_STEPS
from ..manifest import BAKE, UNDO
from ..settings import DISABLE
from ..status import BAKED, Status, Verdict
from ..text import te_name
from ..version import __version__


def fixes_by_outcome(decision: Decision) -> dict[str, list[str]]:
    """Return, for each outcome in words, the ids of its fixes. Outcomes without a fix are absent."""
    reading = decision.reading
    lists = {
        "may be there, but cannot be fixed": list(decision.cannot_apply),
        "can be fixed": list(decision.to_apply),
        f"disabled by {decision.settings.disabled_by}": decision.disabled,
        f"{BAKED} {reading.manifest.by if reading.manifest else ''}": reading.in_bake(Status.APPLIED),
        "disabled in the bake": reading.in_bake(Status.DISABLED),
    }
    return {outcome: ids for outcome, ids in lists.items() if ids}


def summary_line(decision: Decision) -> str:
    """Return a sentence: the number of bugs in this TE, in total and by outcome, or why no fix can be applied."""
    te, by_outcome = te_name(decision.source.version), fixes_by_outcome(decision)
    if decision.unusable_reason:
        return f"{te}: no fix can be applied: {decision.unusable_reason}"
    total = sum(map(len, by_outcome.values()))
    if not total:
        return f"{te} has none of the {len(CATALOGUE)} known bugs."
    bugs = f"{te} {'had' if decision.reading.manifest else 'has'} {total} of the {len(CATALOGUE)} known bugs"
    if len(by_outcome) == 1:
        verb = "" if decision.to_apply or decision.cannot_apply else "are "
        return f"{bugs}; all {total} {verb}{next(iter(by_outcome))}."
    return f"{bugs}: {', '.join(f'{len(ids)} {outcome}' for outcome, ids in by_outcome.items())}."


def status(decision: Decision, everything: bool, where: str) -> Iterator[str]:
    """Yield the lines of ``status`` (``everything``: ``status --all``): a summary, the bugs, and the next commands."""
    yield summary_line(decision)
    yield f"in {decision.source.location} (te-graph-fixes {__version__})"
    if conflict := settings_conflict(decision):
        yield f"warning: {conflict}"
    if decision.unusable_reason:
        return
    by_outcome, width = fixes_by_outcome(decision), max(map(len, CATALOGUE))
    for (outcome, ids), group in itertools.product(by_outcome.items(), GROUPS):
        members = [fix_id for fix_id in ids if CATALOGUE[fix_id].group == group]
        if members:
            yield f"\n{group}: {outcome}"
        for fix_id in members:
            yield f"  {fix_id:{width}}  {CATALOGUE[fix_id].symptom}"
            if everything:
                yield f"  {'':{width}}  affects: {CATALOGUE[fix_id].affects}"
    if everything:
        yield "\nnot affected"
        for fix_id in sorted(CATALOGUE.keys() - set().union(*by_outcome.values())):
            fix = decision.fixes[fix_id]
            yield f"  {fix_id:{width}}  {fix.status}: {fix.reason}"
    yield from _next_steps(decision, where)


def _next_steps(decision: Decision, where: str) -> Iterator[str]:
    if decision.outdated:
        yield f"\nAnother version of te-graph-fixes baked this TransformerEngine. Replace its fixes:\n  {BAKE}{where}"
    elif decision.cannot_apply:
        yield f"\nFor details about the bugs that cannot be fixed:\n  te-graph-fixes issue{where}"
    if decision.to_apply and not where:
        yield "\nDoes your job have wrong gradients? Compare its graphs with eager runs, without the fixes:"
        yield "  TE_GRAPH_FIXES=off te-graph-fixes run --check CMD"
        yield "Start it with the fixes in memory. Nothing on disk changes:"
        yield "  te-graph-fixes run CMD"
        yield "For an image, write the fixes into TransformerEngine's files:"
        yield "  te-graph-fixes bake"


def record(decision: Decision) -> dict[str, Any]:
    """Return the data that ``status --json`` prints."""
    fixes = {
        fix_id: {
            "status": Verdict.APPLICABLE if fix.status == Status.PENDING else fix.status,
            "expected": CATALOGUE[fix_id].expected(decision.source.version),
            "reason": fix.reason,
            "upstream": fix.upstream,
        }
        for fix_id, fix in decision.fixes.items()
    }
    return {
        "te_graph_fixes_version": __version__,
        "te_version": decision.source.version,
        "source": decision.source.location,
        "outdated": bool(decision.outdated),
        "fixes": fixes,
    }


def explain(fix: Fix) -> Iterator[str]:
    """Yield the lines of ``explain`` for one fix: summary, table, explanation (`Fix.account`) and patch."""
    rows = {
        "symptom": fix.symptom,
        "affects": fix.affects,
        "versions": f"TransformerEngine {fix.versions}",
        "cost": fix.cost or "none known",
        "disable": f"{DISABLE}={fix.id} (if it is baked, first run `{UNDO}`)",
        "requires": ", ".join(fix.requires),
        "upstream": upstream(fix),
        "diff": f"te-graph-fixes diff {fix.id}",
    }
    if dependent := [other for other in CATALOGUE if fix.id in with_required([other]) - {other}]:
        rows["disable"] += f"\n{'':11}also disables {', '.join(dependent)}, which depend on it"
    account = re.sub(r"\s\([^()]*\b(te_graph_fixes|docs)/[^()]*\)", "", fix.account.replace("``", "`"))
    own_patch = fix.patch.removeprefix(REPLAY_STEPS).rstrip()
    yield f"{fix.id} ({fix.group})\n\n{fix.summary}\n"
    yield from (f"{name:10} {text}" for name, text in rows.items() if text)
    yield f"\n{account}\n\nThe patch, with TE's own lines:\n{own_patch}"


def upstream(fix: Fix) -> str:
    """Return the upstream status of a bug, with links."""
    links = ", ".join(fix.upstream)
    if fix.merged:
        return f"fixed in TransformerEngine {fix.merged}" + (f": {links}" if links else "")
    return f"not fixed upstream; see {links}" if links else "not fixed upstream"


def listing() -> Iterator[str]:
    """Yield the lines of ``list``: every fix by group, with its symptom, affected versions and upstream status."""
    for group in GROUPS:
        yield f"{group}\n"
        for fix in (fix for fix in CATALOGUE.values() if fix.group == group):
            yield f"  {fix.id}: {fix.symptom}\n    TransformerEngine {fix.versions}; {upstream(fix)}"
        yield ""
    yield "TE_GRAPH_FIXES=upstream applies the fixes of bugs that a later TE has fixed, and the fixes they require."


def records() -> dict[str, dict[str, Any]]:
    """Return the data that ``list --json`` prints."""
    names = ("group", "symptom", "affects", "since", "merged", "requires", "upstream")
    return {fix.id: {name: getattr(fix, name) for name in names} for fix in CATALOGUE.values()}
