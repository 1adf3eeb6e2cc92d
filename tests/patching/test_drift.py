"""Test the verdicts and edits of every fix on the sources of published TransformerEngines (TE).

The tests import nothing from TE. `tests.support.published` fetches the sources.
"""

from __future__ import annotations

import ast
import builtins
import dis
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import CodeType

import pytest
from packaging.version import Version

from te_graph_fixes.commands.cli import main
from te_graph_fixes.decision import Reading, decide, read
from te_graph_fixes.fix import OLDEST, Assessment, Fix
from te_graph_fixes.fixes import CATALOGUE, assess
from te_graph_fixes.patching.installation import FunctionPatch, compile_patches, patched
from te_graph_fixes.patching.source import Source
from te_graph_fixes.settings import Settings
from te_graph_fixes.status import Verdict
from tests.support.child import Cli
from tests.support.published import VERSIONS, examined, needed, source

LACKS = {"fused-dummy-copies": "2.19", "nvfp4-weight-preswizzle": "2.18"}
"""The first version of TE with the feature of a fix, if older covered versions lack the feature."""

LAYOUTS = ("2.12.0", VERSIONS[-1])
"""Two versions with different layouts of the source, for slow tests."""


def wanted(fix: Fix, version: str) -> Verdict | None:
    """Return the expected verdict of a fix on a version of TE, from `OLDEST`, `LACKS` and `Fix.expected`."""
    if Version(version) < Version(OLDEST):
        return Verdict.UNRECOGNIZED
    lacks = Version(version) < Version(LACKS.get(fix.id, OLDEST))
    return Verdict.NOT_APPLICABLE if lacks else fix.expected(version)


def words(found: Mapping[str, Assessment]) -> dict[str, str]:
    return {fix: verdict.verdict for fix, verdict in found.items()}


def compiled(tree: Source, changes: Mapping[str, Assessment]) -> list[FunctionPatch]:
    """Compile and return the changed functions. Fail if one reads an undefined name or changes its free variables."""
    patches = compile_patches(tree, changes)
    for patch in patches:
        module = tree.module(patch.module)
        in_module = compile(module.text, module.path, "exec", dont_inherit=True)
        definitions = {node.name for node in module.tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        defined = {*vars(builtins), *in_module.co_names, *definitions}
        undefined = global_names(patch.after) - global_names(patch.before) - defined
        assert not undefined, f"{', '.join(sorted(patch.owners))} in {patch.qualname}"
        assert not patch.before or patch.before.co_freevars == patch.after.co_freevars
    return patches


def global_names(code: CodeType | None) -> set[str]:
    """Return the global names that a function and the functions nested in it read."""
    if code is None:
        return set()
    names = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    return names.union(*(global_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


@pytest.mark.parametrize("version", VERSIONS)
def test_verdicts(version: str) -> None:
    assert examined(version)[0].version == version
    others = [
        f"{fix.id} is {verdict.verdict}, not {wanted(fix, version)}: {verdict.reason}\n{verdict.details}"
        for fix, verdict in zip(CATALOGUE.values(), examined(version)[1].values(), strict=True)
        if verdict.verdict != wanted(fix, version)
    ]
    assert not others, "\n".join(others)
    assert compiled(examined(version)[0], needed(version)) or not needed(version)


def test_te_before_the_oldest_that_is_tested_is_left_alone(cli: Cli) -> None:
    tree = examined("2.9.0")[0]
    reason = "version 2.9.0 is too old (2.10 is the oldest tested)"
    status, out, _ = cli("status", "--source", tree.location)
    assert (status, out.count(reason)) == (1, 1)
    status, out, err = cli("diff", "--source", tree.location)
    assert (status, out, err.count(reason)) == (1, "", 1)


@pytest.mark.parametrize("version", [None, "unknown", "2.10.0rc1", "2.10.0.dev0+abc"])
def test_where_the_version_is_unknown_the_source_decides(version: str | None) -> None:
    tree, known = examined("2.10.0")
    assert words(assess(Source(tree.location, version))) == words(known)


@pytest.mark.parametrize("origin", ["newest", "TE_SOURCE"])
def test_the_newest_te_is_recognized(origin: str) -> None:
    if origin == "TE_SOURCE" and not os.environ.get("TE_SOURCE"):
        pytest.skip("TE_SOURCE names no checkout")
    tree = Source.at(source("newest") if origin == "newest" else os.environ["TE_SOURCE"])
    unknown = {fix: verdict.reason for fix, verdict in assess(tree).items() if verdict.verdict == Verdict.UNRECOGNIZED}
    assert not unknown
    chosen = {fix: verdict for fix, verdict in assess(tree).items() if verdict.verdict == Verdict.APPLICABLE}
    assert compiled(tree, chosen)


@pytest.mark.parametrize("version", LAYOUTS)
def test_what_diff_shows_is_what_runs(version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree, verdict_of = examined(version)
    chosen = decide(Reading(tree, verdict_of), Settings()).to_apply
    assert main(["diff", "--source", tree.location]) == 0
    shutil.copytree(Path(tree.location).parent, tmp_path, dirs_exist_ok=True)
    patch = ["patch", "-p1", "--fuzz=0"] if shutil.which("patch") else ["git", "apply", "-p1", "-"]
    subprocess.run(patch, input=capsys.readouterr().out.encode(), cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)

    copy = Source.at(tmp_path)
    for name, (_, after) in patched(tree, chosen).items():
        assert copy.module(name).text == after
    again = read(copy).assessments
    assert words(again) == {
        fix: Verdict.NOT_NEEDED if fix in chosen else verdict.verdict for fix, verdict in verdict_of.items()
    }
    assert {fix for fix, verdict in again.items() if verdict.reason.startswith("baked by")} == set(chosen)


@pytest.mark.parametrize("version", LAYOUTS)
def test_a_fix_needs_no_other_to_be_compiled(version: str) -> None:
    tree, chosen = examined(version)[0], needed(version)
    assert patched(tree, chosen) == patched(tree, dict(reversed(chosen.items())))
    for fix, verdict in chosen.items():
        assert compiled(tree, {fix: verdict}) or verdict.new_modules
