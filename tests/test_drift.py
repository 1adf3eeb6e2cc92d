"""Every fix against the sources of every published TransformerEngine (TE): verdicts, and that the edits fit.

Nothing is imported from TE. What is fetched, and where it is kept, is in `tests.published`.
"""

from __future__ import annotations

import ast
import builtins
import gc
import itertools
import os
import re
import shutil
import subprocess
import symtable
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from te_graph_fixes.cli import main
from te_graph_fixes.engine import changes, patched
from te_graph_fixes.fix import APPLICABLE, NOT_APPLICABLE, NOT_NEEDED, UNRECOGNIZED, Verdict
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.settings import Settings
from te_graph_fixes.source import ModuleSource, Source
from te_graph_fixes.verdicts import Reading, verdicts
from tests.published import VERSIONS, examined, needed, source

FIRST = {
    "backward-amax-reduction": "2.10.0",
    "backward-dw-hooks": "2.10.0",
    "backward-dw-order": "2.10.0",
    "capture-without-warmup": "2.10.0",
    "delayed-wgrad-delivery": "2.10.0",
    "fp8-state-at-replay": "2.10.0",
    "fused-dummy-copies": "2.19.0",
    "grouped-linear-amax-reduction": "2.10.0",
    "grouped-linear-skip-flag": "2.10.0",
    "nvfp4-weight-preswizzle": "2.18.0",
    "nested-autocast": "2.8.0",
    "recompute-in-graphs": "2.10.0",
    "replay-arguments": "2.10.0",
    "calibrating-recipe": "2.9.0",
    "skip-flag-accessors": "2.15.0",
    "skip-flag-reset": "2.9.0",
    "stale-fp8-weights": "2.9.0",
    "unreached-wgrads": "2.10.0",
    "wgrad-hook-order": "2.10.0",
    "wgrad-memory-reuse": "2.10.0",
}
"""The first published version with the defect, where it is not the first of all."""

LAST = {
    "backward-dw-hooks": "2.12.0",
    "grouped-linear-skip-flag": "2.16.1",
    "none-outputs": "2.12.0",
    "param-grad-lifetime": "2.18.0",
    "skip-flag-accessors": "2.16.1",
    "tuple-samples": "2.11.0",
    "warmup-reset": "2.13.0",
}
"""The last published version with the defect, where it is not in the newest."""

LACKS = (
    *("backward-dw-hooks", "backward-dw-order", "delayed-wgrad-delivery"),
    *("stale-fp8-weights", "wgrad-hook-order", "backward-amax-reduction", "fp8-state-at-replay", "nested-autocast"),
    *("replay-arguments", "calibrating-recipe", "skip-flag-reset", "fused-dummy-copies"),
    *("capture-without-warmup", "unreached-wgrads", "wgrad-memory-reuse", "recompute-in-graphs"),
)
"""The fixes of features which the versions before `FIRST` do not have, or in which they do not cover them."""

SINCE = {"nvfp4-weight-preswizzle": "2.12.0"}
"""The first version with the feature, where there are versions with it before the defect."""

REPRESENTATIVE = ("2.10.0", "2.12.0", "2.15.0", VERSIONS[-1])
"""Versions that between them have every defect and every layout of the source."""

HIDES = {"delayed-wgrad-delivery": "backward-dw-hooks"}
"""A fix that, alone in a source, makes the other unrecognized. It requires the other: `diff` never gives it alone."""

ACCESSOR = ("quantization_state.skip_fp8_weight_update_tensor", "get_skip_fp8_weight_update_tensor()")
"""How the skip tensor is read where there is no accessor, and where there is one: either is right."""


def position(version: str) -> int:
    return VERSIONS.index(version)


def wanted(fix: str, version: str) -> str:
    if position(version) < position(FIRST.get(fix, VERSIONS[0])):
        lacks = fix in LACKS or position(version) < position(SINCE.get(fix, VERSIONS[0]))
        return NOT_APPLICABLE if lacks else NOT_NEEDED
    return APPLICABLE if position(version) <= position(LAST.get(fix, VERSIONS[-1])) else NOT_NEEDED


def baked(tree: Source, chosen: Iterable[Verdict]) -> Source:
    """``tree`` with the edits of the verdicts in its text."""
    result = Source(tree.location, tree.version, tree.consulted)
    result._modules.update(tree._modules)
    for name, (_, text) in patched(tree, chosen).items():
        original = tree.find(name)
        result._modules[name] = ModuleSource(name, original.path if original else name, text, consulted=tree.consulted)
    return result


def words(found: Mapping[str, Verdict]) -> dict[str, str]:
    return {fix: verdict.verdict for fix, verdict in found.items()}


@pytest.mark.parametrize("version", VERSIONS)
def test_verdicts(version: str) -> None:
    assert examined(version)[0].version == version
    assert words(examined(version)[1]) == {fix: wanted(fix, version) for fix in CATALOGUE}


@pytest.mark.parametrize("origin", ["newest", "TE_SOURCE"])
def test_the_newest_te_is_recognized(origin: str) -> None:
    if origin == "TE_SOURCE" and not os.environ.get("TE_SOURCE"):
        pytest.skip("TE_SOURCE names no checkout")
    tree = Source.at(source("newest") if origin == "newest" else os.environ["TE_SOURCE"])
    unknown = {fix: verdict.reason for fix, verdict in verdicts(tree).items() if verdict.verdict == UNRECOGNIZED}
    assert not unknown
    chosen = {fix: verdict for fix, verdict in verdicts(tree).items() if verdict.verdict == APPLICABLE}
    assert changes(tree, chosen)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_diff_shows_is_what_runs(version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree, verdict_of = examined(version)
    chosen = Reading(tree, Settings(), verdict_of).to_apply
    assert main(["diff", "--source", tree.location]) == 0
    shutil.copytree(Path(tree.location).parent, tmp_path, dirs_exist_ok=True)
    patch = ["patch", "-p1", "--fuzz=0"] if shutil.which("patch") else ["git", "apply", "-p1", "-"]
    subprocess.run(patch, input=capsys.readouterr().out.encode(), cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)

    copy = Source.at(tmp_path)
    for name, (_, after) in patched(tree, chosen.values()).items():
        assert copy.module(name).text == after
    for change in changes(tree, chosen):
        for code, where in ((change.before, tree), (change.after, copy)):
            on_disk = functions(where.module(change.module)).get(change.qualname)
            assert code == on_disk or (code and on_disk and shape(code) == shape(on_disk) and where is copy)
    assert words(verdicts(copy)) == {
        fix: NOT_NEEDED if fix in chosen else verdict.verdict for fix, verdict in verdict_of.items()
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_only_the_functions_that_are_named_differ(version: str) -> None:
    tree, chosen = examined(version)[0], needed(version)
    touched = {(change.module, change.qualname) for change in changes(tree, chosen) if change.block}
    for name, (before, after) in patched(tree, chosen.values()).items():
        if before:
            names = {qualname for module, qualname in touched if module == name}
            assert without(before, names) == without(after, names)


def test_a_reading_lets_the_syntax_trees_go_without_a_collection() -> None:
    def trees() -> int:
        return sum(isinstance(found, ast.Module) for found in gc.get_objects())

    gc.disable()
    try:
        before = trees()
        reading = Reading(Source.at(source("2.12.0")), Settings())
        assert trees() == before
        assert reading.source.module("transformer_engine.pytorch.graph").tree
    finally:
        gc.enable()


def unset_names(text: str) -> set[str]:
    """What functions take for a global name, and nobody sets."""
    top = symtable.symtable(text, "module", "exec")
    tables = [top]
    for table in tables:
        tables += table.get_children()
    symbols = [symbol for table in tables for symbol in table.get_symbols() if symbol.is_referenced()]
    known = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    known |= {table.get_name() for table in top.get_children()} | set(dir(builtins)) | {"__file__", "__class__"}
    return {symbol.get_name() for symbol in symbols if symbol.is_global()} - known


@pytest.mark.parametrize("version", VERSIONS)
def test_the_patched_text_reads_no_name_that_nobody_sets(version: str) -> None:
    tree, verdict_of = examined(version)
    for name, (before, after) in patched(tree, Reading(tree, Settings(), verdict_of).to_apply.values()).items():
        assert unset_names(after) <= (unset_names(before) if before else set()), name


@pytest.mark.parametrize("version", VERSIONS)
def test_the_fixes_do_not_overlap_in_any_pair(version: str) -> None:
    tree, chosen = examined(version)[0], needed(version)
    alone = {fix: replace(verdict, rests_on=frozenset()) for fix, verdict in chosen.items()}
    if version in REPRESENTATIVE:
        assert all(changes(tree, {fix: verdict}) for fix, verdict in alone.items())
    for pair in itertools.combinations(chosen, 2):
        together = patched(tree, [chosen[fix] for fix in pair])
        assert together == patched(tree, [chosen[fix] for fix in reversed(pair)])
        both = set.intersection(*({edit.module for edit in chosen[fix].edits} for fix in pair))
        if version in REPRESENTATIVE and both:  # what one of them edits alone has been compiled
            edits = {fix: tuple(edit for edit in chosen[fix].edits if edit.module in both) for fix in pair}
            assert changes(tree, {fix: replace(alone[fix], edits=edits[fix]) for fix in pair})


@pytest.mark.parametrize("version", REPRESENTATIVE)
def test_a_fix_that_is_in_the_source_does_not_hide_another(version: str) -> None:
    tree, verdict_of = examined(version)
    everything = patched(tree, needed(version).values())
    for fix, verdict in needed(version).items():
        partly = baked(tree, [verdict])
        again = verdicts(partly)
        hidden = {other: UNRECOGNIZED for other in [HIDES.get(fix)] if other in needed(version)}
        assert words(again) == {**words(verdict_of), fix: NOT_NEEDED, **hidden}
        rest = baked(partly, [verdict for verdict in again.values() if verdict.verdict == APPLICABLE])
        if not hidden:
            for name, (_, text) in everything.items():
                again_text = rest.module(name).text.replace(*ACCESSOR)
                assert _lines(again_text) == _lines(text.replace(*ACCESSOR))


def _lines(text: str) -> list[list[str]]:
    """The lines in any order, and in any order the contexts that a line enters, which do not depend on each other."""
    return sorted(sorted(re.split(r", |(?<=with) ", line.strip())) for line in text.splitlines())


def functions(module: ModuleSource) -> dict[str, CodeType]:
    """The code of every function and method by its qualified name."""
    result = {}

    def visit(code: CodeType, prefix: str) -> None:
        for const in code.co_consts:
            if isinstance(const, CodeType):
                name = prefix + const.co_name
                if name in module.definitions:
                    result[name] = const
                    if isinstance(module.definitions[name], ast.ClassDef):
                        visit(const, f"{name}.")

    visit(compile(module.text, module.path, "exec", dont_inherit=True), "")
    return result


def shape(code: CodeType) -> tuple[Any, ...]:
    """All of a code object but where its lines are (Python 3.13 keeps a class's first line among its constants)."""
    line = code.co_firstlineno if "__firstlineno__" in code.co_names else None
    return (
        *(code.co_code, code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
        *(code.co_flags, code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount),
        tuple(
            shape(const) if isinstance(const, CodeType) else (type(const), None if const == line else const)
            for const in code.co_consts
        ),
    )


def without(text: str, names: set[str]) -> str:
    """The syntax of a module with the definitions ``names`` taken out."""

    def strip(body: list[ast.stmt], prefix: str) -> list[ast.stmt]:
        kept = [node for node in body if prefix + getattr(node, "name", "") not in names]
        for node in kept:
            if isinstance(node, ast.ClassDef):
                node.body = strip(node.body, f"{prefix}{node.name}.")
        return kept

    tree = ast.parse(text)
    return ast.dump(ast.Module(strip(tree.body, ""), []))
