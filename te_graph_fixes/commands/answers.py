"""The texts of ``te-graph-fixes status``, ``explain``, ``list`` and ``diff``, and what ``bake`` writes."""

from __future__ import annotations

import difflib
import importlib
import inspect
import io
import itertools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from .. import fixes
from ..decision import Decision, expected, with_required
from ..fix import GROUPS, Fix
from ..fixes import CATALOGUE
from ..patching import TE
from ..patching.installation import patched
from ..patching.source import Source
from ..report import te_name
from ..settings import COMMAND, DISABLE, SWITCH, option
from ..stamp import LEFT_OUT, MADE, NAME, Stamp, digest, is_baked, undoing
from ..status import ON_DISK, Status
from ..version import __version__, fixes_digest


def outcomes(decision: Decision) -> dict[str, list[str]]:
    """The fixes for the defects that a TE has, or may have, by what becomes of them."""
    lists = {
        "not recognised": [fix_id for ids in decision.refused.values() for fix_id in ids],
        "can be corrected": list(decision.to_apply),
    }
    if decision.stamp:
        lists[f"{ON_DISK} by {decision.stamp.by}"] = [fix_id for fix_id in decision.stamp.made if fix_id in CATALOGUE]
    lists[f"left out by {decision.settings.chosen_by}"] = decision.left_out
    lists["left out on disk"] = decision.left_out_on_disk
    return {outcome: ids for outcome, ids in lists.items() if ids}


def status(decision: Decision, everything: bool) -> Iterator[str]:
    """The lines of ``status``: the answer, and the defects by what becomes of them; ``everything``: and all others."""
    yield answer(decision)
    yield f"in {decision.source.location} (te-graph-fixes {__version__})"
    if decision.disagreement:
        yield f"warning: {decision.disagreement}"
    if decision.why_none:
        return
    where = option(decision.source)
    if decision.is_outdated:
        yield f"the fixes in its files are older than those of te-graph-fixes {__version__}"
    elif decision.refused:
        yield f"it may have the defects that are not recognised; `{COMMAND} issue{where}` says why they are not"
    if not where and (decision.refused or decision.to_apply):
        yield f"is your own job hit? `{SWITCH}=off {COMMAND} run --check CMD` compares its graphs with eager"
    width = max(map(len, CATALOGUE))
    by_outcome = outcomes(decision)
    for (outcome, ids), group in itertools.product(by_outcome.items(), GROUPS):
        members = [fix_id for fix_id in ids if CATALOGUE[fix_id].group == group]
        if members:
            yield f"\n{group}, {outcome}"
        for fix_id in members:
            yield f"  {fix_id:{width}}  {CATALOGUE[fix_id].symptom}"
            yield f"  {'':{width}}  affects: {CATALOGUE[fix_id].affects}"
    if everything:
        yield "\nnot affected"
        for fix_id in sorted(CATALOGUE.keys() - set().union(*by_outcome.values())):
            yield f"  {fix_id:{width}}  {decision.verdicts[fix_id].status}: {decision.decisions[fix_id].reason}"


def record(decision: Decision) -> dict[str, Any]:
    """``status --json``."""
    fixes = {
        fix_id: {
            "verdict": verdict.status,
            "expected": expected(CATALOGUE[fix_id], decision.version),
            "reason": verdict.reason,
            "upstream": CATALOGUE[fix_id].upstream,
        }
        for fix_id, verdict in decision.decisions.items()
    }
    about = {"te_version": decision.version, "source": decision.source.location, "outdated": decision.is_outdated}
    return {"te_graph_fixes_version": __version__, **about, "fixes": fixes}


def answer(decision: Decision) -> str:
    """One line: how many defects this TE has and what becomes of them, and what to type next."""
    name, chosen_by = te_name(decision.version), decision.settings.chosen_by
    if decision.why_none:
        return f"{name}: nothing is applied: {decision.why_none}"
    said = ", ".join(f"{len(ids)} {outcome}" for outcome, ids in outcomes(decision).items())
    where = option(decision.source)
    bake = f"{COMMAND} bake{where}"
    if decision.is_outdated:
        next_one = bake if is_baked(decision.source) else undoing(decision.source)
    elif decision.refused:
        next_one = f"{COMMAND} issue{where}"
    elif decision.to_apply:
        next_one = bake if where else f"{COMMAND} run CMD, or {bake}"
    else:
        next_one = f"unset {chosen_by}" if decision.left_out else "nothing to do"
    return f"{name}: of {len(CATALOGUE)} known defects, {said or 'none'}. Next: {next_one}"


def explain(fix: Fix, decision: Decision | None) -> Iterator[str]:
    """The lines of ``explain``, with what holds for the TE of ``decision``, if there is one."""
    rows = {
        "symptom": fix.symptom,
        "affects": fix.affects,
        "versions": f"TransformerEngine {fix.versions}",
        "cost": fix.cost or "none known",
        "leave out": f"{DISABLE}={fix.id}",
        "requires": ", ".join(fix.requires),
        "upstream": upstream(fix),
    }
    if decision:
        decided, where = decision.decisions[fix.id], option(decision.source)
        reason = f"{decided.status}: {decided.reason}"
        if decided.status == Status.APPLICABLE:
            reason = "it has this defect"
            rows["change"] = f"{COMMAND} diff {' '.join(sorted(with_required(fix.id)))}{where}"
        if decided.stamped:
            rows["leave out"] = f"{COMMAND} bake --undo{where}, then bake with {DISABLE}={fix.id}"
        rows["here"] = f"{te_name(decision.version)}: {reason}"
    if dependent := [other for other in CATALOGUE if fix.id in with_required(other) - {other}]:
        rows["leave out"] += f"\n{'':11}also leaves out {', '.join(dependent)}: wrong without it"
    module = importlib.import_module(f"{fixes.__name__}.{fix.id.replace('-', '_')}")
    _, _, *paragraphs = str(inspect.getdoc(module)).replace("``", "`").split("\n\n")  # after its title and the links
    account = re.sub(r"\s\([^()]*\b(te_graph_fixes|docs)/[^()]*\)", "", "\n\n".join(paragraphs))
    yield f"{fix.id} ({fix.group}): {fix.summary}\n"
    yield from (f"{name:10} {text}" for name, text in rows.items() if text)
    yield f"\n{account}\n\nThe change, in TE's own lines:\n{fix.patch.rstrip()}"


def upstream(fix: Fix) -> str:
    """What upstream has done about a defect, and where."""
    links = ", ".join(fix.upstream)
    if fix.merged:
        return f"corrected in TransformerEngine {fix.merged}" + (f": {links}" if links else "")
    return f"open, about it: {links}" if links else "open"


def listing() -> Iterator[str]:
    """The lines of ``list``: every fix by group, with its symptom, the versions that have the defect, and upstream."""
    for group in GROUPS:
        yield f"{group}\n"
        for fix in (fix for fix in CATALOGUE.values() if fix.group == group):
            yield f"  {fix.id}: {fix.symptom}\n    TransformerEngine {fix.versions}; {upstream(fix)}"
        yield ""
    yield "TE_GRAPH_FIXES=upstream applies those that are corrected in a later TransformerEngine, and what they require"


def records() -> dict[str, dict[str, Any]]:
    """``list --json``: the same of each fix, by its id."""
    names = ("group", "symptom", "affects", "affected_versions", "merged", "requires", "upstream")
    return {fix.id: {name: getattr(fix, name) for name in names} for fix in CATALOGUE.values()}


def corrected(decision: Decision) -> dict[str, tuple[str, str]]:
    """The text, before ("": there is none) and after, of every module that the fixes to be applied change or add.

    The keys are the paths from the folder that holds TE, in their order, and last that of the stamp; the line breaks
    are those of each file.
    """
    source, files = decision.source, {}
    for name, texts in patched(source, decision.to_apply).items():
        module = source.find(name)
        before, after = (text.replace("\n", module.newline if module else "\n") for text in texts)
        files[module_path(source, name)] = before, after
    if not files:
        return {}
    files = dict(sorted(files.items()))
    digests = {
        path: (digest(before.encode()) if before else None, digest(after.encode()))
        for path, (before, after) in files.items()
    }
    made = {fix_id: str(verdict.status) for fix_id, verdict in decision.verdicts.items()}
    made |= dict.fromkeys(decision.to_apply, MADE) | dict.fromkeys(decision.left_out, LEFT_OUT)
    stamp = Stamp(__version__, fixes_digest(), decision.version, made, digests)
    return {**files, f"{TE}/{NAME}": ("", json.dumps(asdict(stamp), indent=1) + "\n")}


def module_path(source: Source, module: str) -> str:
    """The path of a module's file, from the folder that holds TE."""
    file = source.find(module)
    return os.path.relpath(file.path, os.path.dirname(source.location)) if file else f"{module.replace('.', '/')}.py"


def unified(decision: Decision) -> Iterator[str]:
    """The lines of a diff that ``patch -p1`` accepts, last lines of a file without a line break included."""
    for path, texts in corrected(decision).items():
        before, after = (io.StringIO(text, newline="").readlines() for text in texts)
        for line in difflib.unified_diff(before, after, f"a/{path}" if before else "/dev/null", f"b/{path}"):
            yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
