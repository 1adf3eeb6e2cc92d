"""The texts of ``te-graph-fixes status``, ``explain`` and ``list``: what is wrong with this TransformerEngine (TE)."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator

from .. import __version__, fixes
from ..decision import ON_DISK, Decision, with_required
from ..fix import APPLICABLE, GROUPS, Fix
from ..fixes import CATALOGUE
from ..report import te_name
from ..settings import DISABLE

CONTAINERS = {
    "2.12.0+5671fd36": "NeMo 26.02",
    "2.14.0+71bbefbf": "NeMo 26.04",
    "2.16.0+b9d690e0": "NeMo 26.06",
    "2.17.1+4329ff84": "NeMo 26.08",
}
"""The containers that hold a vendor's build, by its version."""


def name_of(version: str | None) -> str:
    """TE with its version, and the container where that is known."""
    container = CONTAINERS.get(version or "")
    return te_name(version) + (f" ({container})" if container else "")


def status(decision: Decision, where: str, everything: bool) -> Iterator[str]:
    """The lines of ``status``: the answer, the defects by group, what cannot be corrected, on demand ``everything``.

    ``where`` is the option that names this TE, for the commands that are proposed.
    """
    yield answer(decision, where)
    yield f"in {decision.source.location} (te-graph-fixes {__version__})"
    if decision.refusal:
        return
    refused = [fix_id for ids in decision.refused.values() for fix_id in ids]
    sections = {group: [i for i in decision.to_apply if CATALOGUE[i].group == group] for group in GROUPS}
    sections[f"not recognised, so it may be there (te-graph-fixes issue{where} says why)"] = refused
    sections[f"left out by {decision.settings.chosen_by}"] = decision.left_out
    lines = {fix_id: fix.symptom for fix_id, fix in CATALOGUE.items()}
    if everything:
        rest = CATALOGUE.keys() - {*decision.to_apply, *refused, *decision.left_out}
        lines.update({i: f"{decision.verdicts[i].verdict}: {decision.reason(i, bool(where))}" for i in rest})
        sections["not affected"] = sorted(rest)
    width = max(map(len, CATALOGUE))
    for title, ids in sections.items():
        if ids:
            yield f"\n{title}"
            yield from (f"  {fix_id:{width}}  {lines[fix_id]}" for fix_id in ids)


def answer(decision: Decision, where: str) -> str:
    """One line: how many defects this TE has, how many of them can be corrected, and what to type next."""
    name, by = name_of(decision.version), decision.settings.chosen_by
    if decision.refusal:
        return f"{name}: nothing is applied, because {decision.refusal}"
    here, left, unknown = len(decision.to_apply), len(decision.left_out), sum(map(len, decision.refused.values()))
    on_disk = [each.reason for each in decision.decisions.values() if each.reason.startswith(ON_DISK)]
    known = f"{here + left or len(on_disk) or 'none'} of {len(CATALOGUE)} known defects"
    following = f"te-graph-fixes bake{where}" if where else "te-graph-fixes run CMD, or te-graph-fixes bake"
    if left:
        known += f"; {here or 'none'} will be corrected, {left} {'are' if left > 1 else 'is'} left out by {by}"
        following = following if here else f"unset {by}"
    elif here:
        known += f"; all {here} can be corrected"
    else:
        known += f" were {on_disk[0]}" if on_disk else ""
        following = "nothing to do"
    if unknown:
        known, following = f"{known}; {unknown} more may be there", f"te-graph-fixes issue{where}"
    return f"{name}: {known}. Next: {following}"


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
        found = decision.decisions[fix.id]
        reason = f"{found.verdict}: {decision.reason(fix.id)}"
        if found.verdict == APPLICABLE:
            reason = "it has this defect" + decision.reason(fix.id).removeprefix(fix.summary)
        rows["here"] = f"{name_of(decision.version)}: {reason}"
        if found.stamped:
            rows["leave out"] = f"te-graph-fixes bake --undo{where}, then bake with {DISABLE}={fix.id}"
        if found.verdict == APPLICABLE:
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
