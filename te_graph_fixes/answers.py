"""The texts of ``te-graph-fixes status``, ``explain`` and ``list``: what is wrong with this TransformerEngine (TE)."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator

from . import __version__, fixes
from .fix import APPLICABLE, GROUPS, Fix
from .fixes import CATALOGUE
from .settings import DISABLE, chosen_by
from .verdicts import ON_DISK, Decision, with_required

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
    return f"TransformerEngine {version or '(version unknown)'}" + (f" ({container})" if container else "")


def status(decision: Decision, where: str, everything: bool) -> Iterator[str]:
    """The lines of ``status``: the answer, the defects by group, what cannot be corrected, on demand ``everything``.

    ``where`` is the option that names this TE, for the commands that are proposed.
    """
    yield answer(decision, where)
    yield f"in {decision.source.location} (te-graph-fixes {__version__})"
    if decision.refusal:
        return
    for group in GROUPS:
        yield from _section(group, {i: CATALOGUE[i].symptom for i in decision.to_apply if CATALOGUE[i].group == group})
    refused = [fix_id for ids in decision.refused.values() for fix_id in ids]
    title = f"not recognised, so it may be there (te-graph-fixes issue{where} says why)"
    yield from _section(title, {fix_id: CATALOGUE[fix_id].symptom for fix_id in refused})
    yield from _section(f"left out by {chosen_by()}", {i: CATALOGUE[i].symptom for i in decision.left_out})
    if everything:
        said = {*decision.to_apply, *refused, *decision.left_out}
        rest = [fix_id for fix_id in CATALOGUE if fix_id not in said]
        word = {fix_id: decision.verdicts[fix_id].verdict for fix_id in rest}
        yield from _section("not affected", {i: f"{word[i]}: {decision.reason(i, bool(where))}" for i in rest})


def answer(decision: Decision, where: str) -> str:
    """One line: how many defects this TE has, how many of them can be corrected, and what to type next."""
    name, by = name_of(decision.version), chosen_by()
    if decision.refusal:
        return f"{name}: nothing is applied, because {decision.refusal}"
    here, left, unknown = len(decision.to_apply), len(decision.left_out), sum(map(len, decision.refused.values()))
    on_disk = [each.reason for each in decision.decisions.values() if each.reason.startswith(ON_DISK)]
    known = f"{here + left or len(on_disk) or 'none'} of {len(CATALOGUE)} known defects"
    following = f"te-graph-fixes bake{where}" if where else "te-graph-fixes run CMD, or te-graph-fixes bake"
    if here and left:
        known += f"; {here} will be corrected, {left} {'are' if left > 1 else 'is'} left out by {by}"
    elif here:
        known += f"; all {here} can be corrected"
    elif left:
        known += f"; none will be corrected, because {by} is set"
        following = f"unset {re.sub('=[a-z]+', '', by)}"
    else:
        known += f" were {on_disk[0]}" if on_disk else ""
        following = "nothing to do"
    if unknown:
        known, following = f"{known}; {unknown} more may be there", f"te-graph-fixes issue{where}"
    return f"{name}: {known}. Next: {following}"


def _section(title: str, lines: dict[str, str]) -> Iterator[str]:
    if lines:
        width = max(map(len, CATALOGUE))
        yield f"\n{title}"
        yield from (f"  {fix_id:{width}}  {line}" for fix_id, line in lines.items())


def explain(fix: Fix, decision: Decision | None, changed: int, where: str) -> Iterator[str]:
    """The lines of ``explain``; ``changed`` is the number of lines that change in the TE of ``decision``."""
    found = decision and decision.decisions[fix.id]
    undo = f"te-graph-fixes bake --undo{where}, then bake with " if found and found.stamped else ""
    rows = {
        "symptom": fix.symptom,
        "affected": fix.users,
        "versions": f"TransformerEngine {fix.versions}",
        "here": "",
        "cost": fix.cost,
        "leave out": f"{undo}{DISABLE}={fix.id}",
        "requires": ", ".join(fix.requires),
        "upstream": upstream(fix),
        "change": "",
    }
    if decision and found:
        word = "it has this defect" if found.verdict == APPLICABLE else found.verdict
        rows["here"] = f"{name_of(decision.version)}: {word}: {decision.reason(fix.id)}"
    if dependent := [other for other in CATALOGUE if fix.id in with_required(other) - {other}]:
        rows["leave out"] += f"\n{'':11}also leaves out {', '.join(dependent)}: wrong without it"
    if changed:
        names = sorted(with_required(fix.id))
        size = f"{changed} lines{' with what it requires' * (len(names) > 1)}"
        rows["change"] = f"{size}: te-graph-fixes diff {' '.join(names)}{where}"
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
    """How the defect comes about and what the fix does: what its module says below title, upstream and symptom."""
    paragraphs = str(inspect.getdoc(_module(fix))).split("\n\n")[1:]
    text = "\n\n".join(each for each in paragraphs if not each.startswith(("Upstream:", "Symptom")))
    text = re.sub(r"\s\([^()]*\b(te_graph_fixes|docs)/[^()]*\)", "", text.replace("``", "`"))
    return "\n\n".join(each if each[0].isdigit() else textwrap.fill(each, 118) for each in text.split("\n\n"))


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
