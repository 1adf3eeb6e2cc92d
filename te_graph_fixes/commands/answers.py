"""The texts of ``te-graph-fixes status``, ``explain``, ``list`` and ``diff``, and what ``bake`` writes."""

from __future__ import annotations

import difflib
import importlib
import inspect
import io
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from .. import fixes
from ..decision import Decision, with_required
from ..fix import GROUPS, Fix
from ..fixes import CATALOGUE
from ..patching.installation import patched
from ..patching.source import TE, Source
from ..report import te_name
from ..settings import COMMAND, DISABLE
from ..stamp import LEFT_OUT, MADE, NAME, Stamp, digest, option, own_text
from ..state import State
from ..version import __version__


def status(decision: Decision, everything: bool) -> Iterator[str]:
    """The lines of ``status``: the answer, the defects by group, what cannot be corrected, on demand ``everything``."""
    yield answer(decision)
    yield f"in {decision.source.location} (te-graph-fixes {__version__})"
    if decision.disagreement:
        yield f"warning: {decision.disagreement}"
    if decision.refusal:
        return
    refused = [fix_id for ids in decision.refused.values() for fix_id in ids]
    on_disk = decision.stamp.made if decision.stamp else []
    where = option(decision.source)
    sections = {group: [i for i in decision.to_apply if CATALOGUE[i].group == group] for group in GROUPS}
    sections["corrected on disk"] = [fix_id for fix_id in on_disk if fix_id in CATALOGUE]
    sections[f"not recognised, so it may be there ({COMMAND} issue{where} says why)"] = refused
    sections[f"left out by {decision.settings.chosen_by}"] = decision.left_out
    sections["left out on disk"] = decision.left_out_on_disk
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
            yield f"  {fix_id:{width}}  {decision.verdicts[fix_id].state}: {decision.reason(fix_id, bool(where))}"


def answer(decision: Decision) -> str:
    """One line: how many defects this TE has and what becomes of them, and what to type next."""
    name, settings, stamp = te_name(decision.version), decision.settings, decision.stamp
    if decision.refusal:
        return f"{name}: nothing is applied: {decision.refusal}"
    counts = {
        "can be corrected": len(decision.to_apply),
        f"corrected on disk by {stamp.by if stamp else ''}": len(stamp.made) if stamp else 0,
        f"left out by {settings.chosen_by}": len(decision.left_out),
        "left out on disk": len(decision.left_out_on_disk),
        "not recognised": sum(map(len, decision.refused.values())),
    }
    said = ", ".join(f"{count} {words}" for words, count in counts.items() if count)
    where = option(decision.source)
    bake = f"{COMMAND} bake{where}"
    if decision.is_outdated:
        next_one = bake
    elif decision.refused:
        next_one = f"{COMMAND} issue{where}"
    elif decision.to_apply:
        next_one = bake if where else f"{COMMAND} run CMD, or {bake}"
    else:
        next_one = f"unset {settings.chosen_by}" if decision.left_out else "nothing to do"
    return f"{name}: of {len(CATALOGUE)} known defects, {said or 'none'}. Next: {next_one}"


def explain(fix: Fix, decision: Decision | None = None) -> Iterator[str]:
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
        decided, where = decision.decisions[fix.id], option(decision.source)
        reason = f"{decided.state}: {decision.reason(fix.id)}"
        if decided.state == State.APPLICABLE:
            reason = "it has this defect" + decision.reason(fix.id).removeprefix(fix.summary)
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
            if fix.requires:
                yield f"    requires {', '.join(fix.requires)}"
        yield ""
    yield "TE_GRAPH_FIXES=upstream applies those that are corrected in a later TransformerEngine, and what they require"


def records() -> dict[str, dict[str, Any]]:
    """``list --json``: the same of each fix, by its id."""
    names = ("group", "symptom", "users", "affected", "merged", "requires", "upstream")
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
    made = {fix_id: str(verdict.state) for fix_id, verdict in decision.verdicts.items()}
    made |= dict.fromkeys(decision.to_apply, MADE) | dict.fromkeys(decision.left_out, LEFT_OUT)
    stamp = Stamp(__version__, own_text(), decision.version, made, digests)
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
