"""Every fix against the sources of every published TransformerEngine (TE): verdicts, and that the edits fit.

Nothing is imported from TE. What is fetched, and where it is kept, is in `tests.support.published`.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from packaging.version import Version

from te_graph_fixes.commands.cli import main
from te_graph_fixes.decision import Decision, expected, verdicts
from te_graph_fixes.fix import OLDEST, Fix, Verdict
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.installation import compile_patches, patched
from te_graph_fixes.patching.source import ModuleSource, Source
from te_graph_fixes.settings import Settings
from te_graph_fixes.state import State
from tests.support.published import COVERED, VERSIONS, examined, needed, source, unset_names

LACKS = {"fused-dummy-copies": "2.19", "nvfp4-weight-preswizzle": "2.12"}
"""The first versions with a feature, where some of those that are covered do not have it."""

WITHOUT_ONE = ("2.12.0", VERSIONS[-1])
"""Versions with other layouts of the source; to compile all fixes but one takes a while."""


def wanted(fix: Fix, version: str) -> str:
    """What the record of a fix leads one to expect."""
    if Version(version) < Version(OLDEST):
        return State.UNRECOGNIZED
    lacks = Version(version) < Version(LACKS.get(fix.id, OLDEST))
    return State.NOT_APPLICABLE if lacks else str(expected(fix, version))


def words(found: Mapping[str, Verdict]) -> dict[str, str]:
    return {fix: verdict.state for fix, verdict in found.items()}


@pytest.mark.parametrize("version", VERSIONS)
def test_verdicts(version: str) -> None:
    assert examined(version)[0].version == version
    others = [
        f"{fix.id} is {verdict.state}, not {wanted(fix, version)}: {verdict.reason}"
        for fix, verdict in zip(CATALOGUE.values(), examined(version)[1].values(), strict=True)
        if verdict.state != wanted(fix, version)
    ]
    assert not others, "\n".join(others)


def test_te_before_the_oldest_that_is_tested_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    tree = examined("2.9.0")[0]
    assert main(["status", "--source", tree.location]) == 1
    reason = "version 2.9.0 is older than 2.10, the oldest that is tested"
    assert capsys.readouterr().out.count(reason) == 1
    assert main(["diff", "--source", tree.location]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count(reason)) == ("", 1)


@pytest.mark.parametrize("version", [None, "unknown", "2.10.0rc1", "2.10.0.dev0+abc"])
def test_where_the_version_is_unknown_the_source_decides(version: str | None) -> None:
    tree, known = examined("2.10.0")
    assert words(verdicts(Source(tree.location, version))) == words(known)


def test_a_negative_verdict_on_a_folder_says_that_it_is_by_shape(capsys: pytest.CaptureFixture[str]) -> None:
    tree, known = examined(VERSIONS[-1])
    assert main(["status", "--all", "--source", tree.location]) == 0
    negative = [verdict for verdict in known.values() if verdict.state in (State.NOT_NEEDED, State.NOT_APPLICABLE)]
    assert capsys.readouterr().out.count("by shape: ") == len(negative) > 0


@pytest.mark.parametrize("origin", ["newest", "TE_SOURCE"])
def test_the_newest_te_is_recognized(origin: str) -> None:
    if origin == "TE_SOURCE" and not os.environ.get("TE_SOURCE"):
        pytest.skip("TE_SOURCE names no checkout")
    tree = Source.at(source("newest") if origin == "newest" else os.environ["TE_SOURCE"])
    unknown = {fix: verdict.reason for fix, verdict in verdicts(tree).items() if verdict.state == State.UNRECOGNIZED}
    assert not unknown
    chosen = {fix: verdict for fix, verdict in verdicts(tree).items() if verdict.state == State.APPLICABLE}
    assert compile_patches(tree, chosen)


@pytest.mark.parametrize("version", COVERED)
def test_what_diff_shows_is_what_runs(version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree, verdict_of = examined(version)
    chosen = Decision(tree, Settings(), verdict_of).to_apply
    assert main(["diff", "--source", tree.location]) == 0
    shutil.copytree(Path(tree.location).parent, tmp_path, dirs_exist_ok=True)
    patch = ["patch", "-p1", "--fuzz=0"] if shutil.which("patch") else ["git", "apply", "-p1", "-"]
    subprocess.run(patch, input=capsys.readouterr().out.encode(), cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)

    copy = Source.at(tmp_path)
    for name, (_, after) in patched(tree, chosen).items():
        assert copy.module(name).text == after
    for change in compile_patches(tree, chosen):
        for code, where in ((change.before, tree), (change.after, copy)):
            on_disk = functions(where.module(change.module)).get(change.qualname)
            assert code == on_disk or (code and on_disk and shape(code) == shape(on_disk) and where is copy)
    again = verdicts(copy)
    assert words(again) == {
        fix: State.NOT_NEEDED if fix in chosen else verdict.state for fix, verdict in verdict_of.items()
    }
    assert {fix for fix, verdict in again.items() if verdict.reason.startswith("corrected on disk by")} == set(chosen)


@pytest.mark.parametrize("version", COVERED)
def test_only_the_functions_that_are_named_differ(version: str) -> None:
    tree, chosen = examined(version)[0], needed(version)
    touched = {(change.module, change.qualname) for change in compile_patches(tree, chosen)}
    for name, (before, after) in patched(tree, chosen).items():
        if before:
            names = {qualname for module, qualname in touched if module == name}
            assert without(before, names) == without(after, names)


@pytest.mark.parametrize("version", COVERED)
def test_the_patched_text_reads_no_name_that_nobody_sets(version: str) -> None:
    tree, verdict_of = examined(version)
    for name, (before, after) in patched(tree, Decision(tree, Settings(), verdict_of).to_apply).items():
        assert unset_names(after) <= (unset_names(before) if before else set()), name


@pytest.mark.parametrize("version", COVERED)
def test_all_fixes_but_one_fit_together(version: str) -> None:
    tree, chosen = examined(version)[0], needed(version)
    for left_out in chosen:
        others = {fix: verdict for fix, verdict in chosen.items() if fix != left_out}
        assert patched(tree, others) == patched(tree, dict(reversed(others.items())))
        if version in WITHOUT_ONE:
            assert compile_patches(tree, others)


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
