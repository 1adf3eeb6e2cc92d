"""A TransformerEngine (TE) that `te-graph-fixes bake` has corrected, on the simulator: graphs are eager bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from te_graph_fixes.commands.cli import main
from te_graph_fixes.patching.source import Source
from tests.fixes.test_core_fixes import CASES
from tests.support.child import on_simulator, simulate
from tests.support.published import COVERED, copy_of, source


@pytest.fixture(scope="module", params=["installed", *(pytest.param(each, marks=pytest.mark.slow) for each in COVERED)])
def baked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = Path(Source.installed().location).parent if request.param == "installed" else source(request.param)
    tree = copy_of(root, tmp_path_factory.mktemp("baked"))
    assert main(["bake", "--source", str(tree)]) == 0
    return tree


@pytest.mark.parametrize("setting", ["off", "on"])
def test_a_baked_te_is_right_with_and_without_the_package(baked: Path, setting: str) -> None:
    done = on_simulator("-m", "te_graph_fixes.verify.child", *CASES, path=baked, TE_GRAPH_FIXES=setting)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["case"]: (line["outcome"], line.get("error"), line["applied"]) for line in found} == {
        case: ("measured", 0.0, []) for case in CASES
    }
    assert ("corrected on disk by te-graph-fixes" in done.stderr) == (setting == "on")


def test_the_hook_does_nothing(baked: Path) -> None:
    program = """
import te_graph_fixes, transformer_engine.pytorch.graph as graph
report = te_graph_fixes.report()
assert {status.status for status in report.fixes.values()} <= {"not-needed", "not-applicable"}, report
assert graph.make_graphed_callables.__code__.co_filename == graph.__file__
"""
    done = on_simulator("-c", program, path=baked)
    assert done.returncode == 0, done.stderr


def test_a_check_on_it_finds_nothing(baked: Path) -> None:
    lines = simulate("tests/support/check_training.py", CASES[0], CASES[1], path=baked).splitlines()
    assert [(found["same"], found["found"]) for found in map(json.loads, lines)] == [(True, [])] * 2
