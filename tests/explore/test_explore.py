"""Test on the simulator that the explorer finds known bugs, draws every kind of program, and shrinks programs."""

from __future__ import annotations

import collections
import functools
import json
import os
import tempfile
from pathlib import Path

import pytest

from tests.explore import programs
from tests.explore.programs import FOUND, broken_rule, draw, draw_broken, shrink
from tests.explore.scripts import script
from tests.support.child import on_simulator, simulate
from tests.verify.driver.program import Program

pytestmark = pytest.mark.te

TE = ("transformer_engine.pytorch",)
SEED = int(os.environ.get("TE_EXPLORE_SEED", "0"))


def explore(*arguments: str) -> tuple[int, list[dict[str, object]]]:
    """Run the explorer. Return its exit status and its output lines: one for each finding, and last the totals."""
    done = on_simulator("-m", "tests.explore", "--seed", str(SEED), *arguments, imported=TE)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("programs", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_programs_are_as_without_graphs(programs: int) -> None:
    status, lines = explore("--programs", str(programs), "--no-shrink")
    assert status == 0, lines
    assert int(str(lines[-1]["equal"])) > programs / 2


def test_a_process_that_fails_is_an_error() -> None:
    done = on_simulator("-m", "tests.explore", "--disable", "nosuchfix", imported=TE)
    assert (done.returncode, done.stdout) == (1, "")
    assert "1 of 1 processes failed" in done.stderr


def test_what_breaks_a_capture_is_right_or_refused() -> None:
    status, lines = explore("--broken", "--programs", "16")
    assert status == 0, lines
    assert lines[-1]["refused"]
    assert lines[-1]["equal"]


@functools.cache
def verdicts_of_found() -> dict[str, object]:
    """Run the programs in `FOUND`. Return the verdict of each, by the bug that the program revealed."""
    with tempfile.TemporaryDirectory() as folder:
        explore("--found", "--no-shrink", "--results", f"{folder}/found")
        lines = [json.loads(line) for line in Path(folder, "found").read_text().splitlines()[1:]]
    return {[*FOUND][line["seed"] - SEED]: line["verdict"] for line in lines}


@pytest.mark.parametrize("defect", FOUND)
def test_what_was_found_stays_corrected(defect: str) -> None:
    verdict = verdicts_of_found()[defect]
    if verdict == "not eager":
        pytest.skip("this TransformerEngine cannot run the program eagerly")
    assert verdict == "equal"


def test_what_is_wrong_without_a_fix_is_found(tmp_path: Path) -> None:
    status, lines = explore(
        *("--seed", "10", "--programs", "14", "--no-shrink"),
        *("--disable", "parameter-hooks", "--scripts", str(tmp_path)),
    )
    assert status == 1
    assert "wrong" in {line["verdict"] for line in lines[:-1]}
    assert len([*tmp_path.iterdir()]) == len(lines) - 1


@pytest.mark.parametrize(
    "program",
    [
        Program(bias=True, delay=True, takes_grads=True, events=("step",)),
        Program(modules=("Parallel",), recipe="delayed", hooks="adds", ranks=True, events=("step",)),
    ],
    ids=["one process", "two ranks"],
)
def test_a_script_shows_the_defect(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "found.py"
    path.write_text(script(program))
    assert not simulate(path)
    status = on_simulator(path, TE_GRAPH_FIXES="off")
    assert status.returncode == 1
    assert ("rank 1: " if program.ranks else "") + "0 step: " in status.stdout


def test_a_program_follows_from_its_seed_and_keeps_the_rules() -> None:
    drawn = [draw(seed) for seed in range(300)]
    assert drawn == [draw(seed) for seed in range(300)]
    assert not any(map(broken_rule, drawn))
    assert len({*drawn}) > 290
    assert draw_broken(5) == draw_broken(5) != draw_broken(6)


def test_each_kind_is_drawn() -> None:
    names = [*programs.MODULES, *programs.EVENTS, *programs.SPECIAL_EVENTS, *programs.ONLY_IN_GROUPS]
    names += [f"weights {value}" for value in ("marked", "cached", "set", "class", "property", "own")]
    counts = collections.Counter[str]()
    for program in map(draw, range(1500)):
        fields = {name for name in programs.ONLY_IN_GROUPS if getattr(program, name)}
        counts.update({*program.modules, *program.events, f"weights {program.weights}", *fields})
    assert [name for name in names if counts[name] < 5] == []


def test_the_summary_lists_errors_beside_wrong_results() -> None:
    status, lines = explore("--regressions", "--switch", "off", "--programs", "4", "--no-shrink")
    assert status == 0
    assert lines[-1]["raises although TE alone is correct"] == []
    assert lines[-1]["wrong without an error"] == [line["seed"] for line in lines[:-1]] != []


def test_shrinking_leaves_what_fails() -> None:
    program = Program(
        modules=("Block", "linear", "nested"), recipe="delayed", bias=True, events=("evaluate", "step", "save", "step")
    )
    small = shrink(program, lambda p: p.recipe == "delayed" and "nested" in p.modules and "save" in p.events)
    assert small == Program(modules=("nested",), recipe="delayed", events=("step", "save"))


WITHOUT_COSTS = """
from unittest import mock
import te_graph_fixes
from tests.verify.driver import events
from tests.verify.driver.program import Program
from tests import simulator
from tests.explore import regressions

with mock.patch.object(simulator, "installed", lambda: False), mock.patch.object(events, "SIMULATED", False):
    found = regressions.measure(Program(events=("step",)), graphs=True)
print(found["verdict"], found["eager costs"] | found["graph costs"])
"""


def test_regressions_on_a_gpu_compare_values_only() -> None:
    assert simulate("-c", WITHOUT_COSTS) == "equal Counter()\n"
