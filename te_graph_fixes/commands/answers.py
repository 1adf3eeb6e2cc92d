"""The texts of ``te-graph-fixes status``, ``explain`` and ``list``: what is wrong with this TransformerEngine (TE)."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from .. import fixes
from ..decision import Decision, with_required
from ..fix import GROUPS, Fix
from ..fixes import CATALOGUE
from ..report import te_name
from ..settings import DISABLE
from ..state import State
from ..version import __version__


def status(decision: Decision, where: str, everything: bool) -> Iterator[str]:
    """The lines of ``status``: the answer, the defects by group, what cannot be corrected, on demand ``everything``.

    ``where`` is the option that names this TE, for the commands that are proposed.
    """
    yield answer(decision, where)
    yield f"in {decision.source.location} (te-graph-fixes {__version__})"
    if decision.disagreement:
        yield f"warning: {decision.disagreement}"
    if decision.refusal:
        return
    refused = [fix_id for ids in decision.refused.values() for fix_id in ids]
    on_disk = decision.stamp.made if decision.stamp else []
    sections = {group: [i for i in decision.to_apply if CATALOGUE[i].group == group] for group in GROUPS}
    sections["corrected on disk"] = [fix_id for fix_id in on_disk if fix_id in CATALOGUE]
    sections[f"not recognised, so it may be there (te-graph-fixes issue{where} says why)"] = refused
    sections[f"left out by {decision.settings.chosen_by}"] = decision.left_out
    sections["left out on disk"] = _left_out_on_disk(decision)
    named = {fix_id for ids in sections.values() for fix_id in ids}
    width = max(map(len, CATALOGUE))
    for title, ids in sections.items():
        if ids:
            yield f"\n{title}"
        for fix_id in ids:
            yield f"  {fix_id:{width}}  {CATALOGUE[fix_id].symptom}"
            yield f"  {'':{width}}  who: {CATALOGUE[fix_id].users}"
            if everything and fix_id in refused:
                yield from (f"  {'':{width}}  {line}" for line in decision.decisions[fix_id].explanation.split("\n"))
    if everything:
        yield "\nnot affected"
        for fix_id in sorted(CATALOGUE.keys() - named):
            reason = decision.reason(fix_id, bool(where))
            yield f"  {fix_id:{width}}  {decision.verdicts[fix_id].state}: {reason}"


def answer(decision: Decision, where: str) -> str:
    """One line: how many defects this TE has and what becomes of them, and what to type next."""
    name, by, stamp = te_name(decision.version), decision.settings.chosen_by, decision.stamp
    if decision.refusal:
        return f"{name}: nothing is applied, because {decision.refusal}"
    counts = {
        "can be corrected": len(decision.to_apply),
        f"corrected on disk by {stamp.by if stamp else ''}": len(stamp.made) if stamp else 0,
        f"left out by {by}": len(decision.left_out),
        "left out on disk": len(_left_out_on_disk(decision)),
        "not recognised": sum(map(len, decision.refused.values())),
    }
    said = ", ".join(f"{count} {words}" for words, count in counts.items() if count)
    return f"{name}: of {len(CATALOGUE)} known defects, {said or 'none'}. Next: {_next(decision, where)}"


def _next(decision: Decision, where: str) -> str:
    if decision.is_outdated:
        return f"te-graph-fixes bake{where}"
    if decision.refused:
        return f"te-graph-fixes issue{where}"
    if decision.to_apply:
        return f"te-graph-fixes bake{where}" if where else "te-graph-fixes run CMD, or te-graph-fixes bake"
    return f"unset {decision.settings.chosen_by}" if decision.left_out else "nothing to do"


def _left_out_on_disk(decision: Decision) -> list[str]:
    return [
        fix_id for fix_id, verdict in decision.verdicts.items() if verdict.stamped and verdict.state == State.DISABLED
    ]


def explain(fix: Fix, decision: Decision | None = None, where: str = "") -> Iterator[str]:
    """The lines of ``explain``, with what holds for the TE of ``decision``."""
    rows = {
        "symptom": fix.symptom,
        "affected": fix.users,
        "versions": f"TransformerEngine {fix.versions}",
        "cost": fix.cost,
        "leave out": f"{DISABLE}={fix.id}",
        "requires": ", ".join(fix.requires),
        "upstream": upstream(fix),
    }
    if decision:
        decided = decision.decisions[fix.id]
        reason = f"{decided.state}: {decision.reason(fix.id)}"
        if decided.state == State.APPLICABLE:
            reason = "it has this defect" + decision.reason(fix.id).removeprefix(fix.summary)
        rows["here"] = f"{te_name(decision.version)}: {reason}"
        if decided.stamped:
            rows["leave out"] = f"te-graph-fixes bake --undo{where}, then bake with {DISABLE}={fix.id}"
        if decided.state == State.APPLICABLE:
            rows["change"] = f"te-graph-fixes diff {' '.join(sorted(with_required(fix.id)))}{where}"
    if dependent := [other for other in CATALOGUE if fix.id in with_required(other) - {other}]:
        rows["leave out"] += f"\n{'':11}also leaves out {', '.join(dependent)}: wrong without it"
    yield f"{fix.id} ({fix.group}): {fix.summary}\n"
    yield from (f"{name:10} {text}" for name, text in rows.items() if text)
    yield f"\n{_account(fix)}\n\nThe change, in TE's own lines:\n{_patch(fix)}"


def upstream(fix: Fix) -> str:
    """What upstream has done about a defect, and where."""
    links = ", ".join(fix.upstream)
    if fix.merged:
        return f"corrected in TransformerEngine {fix.merged}" + (f": {links}" if links else "")
    return f"open, about it: {links}" if links else "open"


def _account(fix: Fix) -> str:
    """How the defect comes about and what the fix does: what its module says below title and upstream."""
    _, _, *paragraphs = str(inspect.getdoc(_module(fix))).split("\n\n")
    text = "\n\n".join(paragraphs)
    return re.sub(r"\s\([^()]*\b(te_graph_fixes|docs)/[^()]*\)", "", text.replace("``", "`"))


def _patch(fix: Fix) -> str:
    return str(getattr(fix.examine, "patch", None) or vars(_module(fix))["PATCH"]).rstrip()


def _module(fix: Fix) -> object:
    return importlib.import_module(f"{fixes.__name__}.{fix.id.replace('-', '_')}")


def listing() -> Iterator[str]:
    """The lines of ``list``: every fix by group, with its symptom, the versions that have the defect, and upstream."""
    for group in GROUPS:
        yield f"{group}\n"
        for fix in (fix for fix in CATALOGUE.values() if fix.group == group):
            yield f"  {fix.id}: {fix.symptom}\n    TransformerEngine {fix.versions}; {upstream(fix)}"
            if fix.requires:
                yield f"    requires {', '.join(fix.requires)}"
        yield ""
    yield "TE_GRAPH_FIXES=upstream applies those that are corrected in a later TransformerEngine, and what they require"


def records() -> dict[str, dict[str, Any]]:
    """``list --json``: the same of each fix, by its id."""
    names = ("group", "symptom", "users", "affected", "merged", "requires", "upstream")
    return {fix.id: {name: getattr(fix, name) for name in names} for fix in CATALOGUE.values()}
