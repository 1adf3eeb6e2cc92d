"""The texts of ``te-graph-fixes status`` and ``explain``: what is wrong with this TransformerEngine (TE), in words."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator

from . import __version__, fixes
from .fix import APPLICABLE, GROUPS, UNRECOGNIZED, Fix
from .fixes import CATALOGUE
from .verdicts import DISABLED, ON_DISK, Decision

CONTAINERS = {
    "2.12.0+5671fd36": "NeMo 26.02",
    "2.14.0+71bbefbf": "NeMo 26.04",
    "2.16.0+b9d690e0": "NeMo 26.06",
}
"""The containers that hold a vendor's build, by its version."""


def name_of(version: str | None) -> str:
    """TE with its version, and the container where that is known."""
    container = CONTAINERS.get(version or "")
    return f"TransformerEngine {version or '(version unknown)'}" + (f" ({container})" if container else "")


def status(decision: Decision, by_source: bool, everything: bool) -> Iterator[str]:
    """The lines of ``status``: the answer, the defects by group, what cannot be corrected, on demand ``everything``."""
    yield answer(decision)
    yield f"in {decision.source.location} (te-graph-fixes {__version__})"
    words = {fix_id: verdict.verdict for fix_id, verdict in decision.decisions.items()}
    about = {fix_id: decision.reason(fix_id, by_source) for fix_id in words}
    here = {group: [i for i in words if words[i] == APPLICABLE and CATALOGUE[i].group == group] for group in GROUPS}
    for group, ids in here.items():
        yield from _section(group, {fix_id: CATALOGUE[fix_id].symptom for fix_id in ids})
    left = [fix_id for fix_id in words if words[fix_id] == UNRECOGNIZED]
    yield from _section("cannot be corrected", {fix_id: about[fix_id] for fix_id in left})
    left_out = [fix_id for fix_id in words if words[fix_id] == DISABLED]
    yield from _section("left out", {fix_id: about[fix_id] for fix_id in left_out})
    if everything:
        rest = [fix_id for fix_id in words if words[fix_id] not in (APPLICABLE, UNRECOGNIZED, DISABLED)]
        yield from _section("not affected", {fix_id: f"{words[fix_id]}: {about[fix_id]}" for fix_id in rest})


def answer(decision: Decision) -> str:
    """One line: how many defects this TE has, how many of them can be corrected, and what to type next."""
    verdicts = [verdict.verdict for verdict in decision.decisions.values()]
    here, unknown, left_out = (verdicts.count(word) for word in (APPLICABLE, UNRECOGNIZED, DISABLED))
    known = f"{here} of {len(CATALOGUE)} known defects"
    if unknown:
        said = f"{known} can be corrected; {unknown} cannot. Next: te-graph-fixes issue"
    elif here:
        said = f"{known}; all {here} can be corrected. Next: te-graph-fixes run CMD, or te-graph-fixes bake"
    elif on_disk := [each.reason for each in decision.decisions.values() if each.reason.startswith(ON_DISK)]:
        said = f"{len(on_disk)} of {len(CATALOGUE)} known defects were {on_disk[0]}. Next: nothing to do"
    else:
        said = f"none of {len(CATALOGUE)} known defects. Next: nothing to do"
    return f"{name_of(decision.version)}: {said}" + (f" ({left_out} are left out by the settings)" if left_out else "")


def _section(title: str, lines: dict[str, str]) -> Iterator[str]:
    if lines:
        width = max(map(len, CATALOGUE))
        yield f"\n{title}"
        yield from (f"  {fix_id:{width}}  {line}" for fix_id, line in lines.items())


def explain(fix: Fix, decision: Decision | None, patch: str) -> Iterator[str]:
    """The lines of ``explain``; ``patch`` is what the fix changes in the TE of ``decision``."""
    yield f"{fix.id} ({fix.group}): {fix.summary}"
    yield f"\nsymptom    {fix.symptom}"
    yield f"expected   in TransformerEngine {fix.affected}"
    if decision:
        verdict = decision.verdicts[fix.id].verdict
        word = "it has this defect" if verdict == APPLICABLE else verdict
        yield f"here       {name_of(decision.version)}: {word}: {decision.reason(fix.id)}"
    files = [line for line in patch.splitlines() if line.startswith("+++ ")]
    changed = [line for line in patch.splitlines() if re.match(r"[+-](?![+-]{2} )", line)]
    yield f"cost       {len(changed)} lines in {len(files)} files; with all fixes a step takes what TE's own takes"
    yield f"leave out  TE_GRAPH_FIXES_DISABLE={fix.id}"
    for other in CATALOGUE.values():
        if fix.id in other.requires:
            yield f"           that leaves out {other.id} too, which is wrong without it"
    for required in fix.requires:
        yield f"requires   {required}"
    for link in fix.upstream or ("open: nobody has corrected it in TE",):
        yield f"upstream   {link}"
    module = importlib.import_module(f"{fixes.__name__}.{fix.id.replace('-', '_')}")
    yield f"\n{inspect.getdoc(module)}"
    if patch:
        yield f"\n{patch}"
