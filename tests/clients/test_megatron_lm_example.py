"""Test the conclusions and tables of `examples/megatron_*.py` with programs that only print logs like Megatron's."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest

ROOT = Path(__file__).parents[2]
RIGHT = ("3.000", "2.000", "1.000", "0.900", "0.800", "0.700", "0.600", "0.500")
WRONG = (*RIGHT[:4], "0.801", *RIGHT[5:])
LINE = " [a time] iteration {0:8}/{1:8} | elapsed time per iteration (ms): {2} | lm loss: 9.2E+00 | grad norm: {3} |"
EXPERT = "decoder.layers.0.mlp.experts.linear_fc1.weight0 of rank 0"
NORMS = {EXPERT: 0.5, "decoder.layers.0.mixer.A_log of rank 0": 0.25}
EQUAL = "te-graph-fixes check, fixes on: 2 steps, 8 callables, 1,456 tensors on 2 ranks: all equal"
DIFFERENT = "te-graph-fixes check, fixes on: 2 steps, 8 callables, 1,456 tensors on 2 ranks: 3 differ, on rank 0"
OF_CHILD = "te-graph-fixes check, fixes on: 0 steps, 0 callables, 0 tensors: nothing was compared"
Run = Callable[..., tuple[int, str]]
CRASH = "[rank0]: Traceback (most recent call last):\n[rank0]: RuntimeError: Could not infer dtype"


def log(norms: tuple[str, ...], *more: str) -> str:
    lines = [LINE.format(i + 1, len(norms), 100.0 + i, norm) for i, norm in enumerate(norms)]
    return "\n".join([*lines, *more, "", "peak memory of rank 0: 1024 MiB", "peak memory of rank 1: 1025 MiB"])


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Add the folder of the examples to the import path, and return the module `megatron_runs`."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("megatron_runs")


@pytest.fixture
def example(runs: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    module = importlib.import_module("megatron_lm")
    (tmp_path / "pretrain_gpt.py").touch()
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: name)
    return module


def print_instead(monkeypatch: pytest.MonkeyPatch, runs: ModuleType, *programs: tuple[str, int]) -> None:
    """Replace the command of each setting by one that prints a text and exits with a status, both from ``programs``."""
    settings = [*runs.SETTINGS, *runs.CHECKED]
    by_setting = dict(zip(settings, programs, strict=False))

    def command(_: object, setting: str) -> list[str]:
        text, status = by_setting[setting]
        return [sys.executable, "-c", f"import sys; print({text!r}); sys.exit({status})"]

    monkeypatch.setattr(runs.Training, "command", command)


@pytest.fixture
def run(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Return a function that runs the example with `print_instead`, and returns the example's status and output."""

    def call(*programs: tuple[str, int], options: tuple[str, ...] = ()) -> tuple[int, str]:
        print_instead(monkeypatch, sys.modules["megatron_runs"], *programs)
        monkeypatch.setattr(sys, "argv", ["megatron_lm.py", str(tmp_path), "--out", str(tmp_path / "out"), *options])
        return example.main(), capsys.readouterr().out

    return call


def test_equal_runs_exit_with_0(run: Run, runs: ModuleType, tmp_path: Path) -> None:
    status, output = run((log(RIGHT), 0), (log(WRONG), 0), (log(RIGHT), 0))
    assert status == 0
    assert "TE's graphs against graphs off: differ: grad norm 1 of 8" in output
    assert "with te-graph-fixes against graphs off: the same in every digit" in output
    assert "| 5 | 9.2E+00 | 9.2E+00 | 9.2E+00 | 0.800 | **0.801** | 0.800 |" in output
    assert "graphs off: 106.0 ms a step (median of 3), peak memory 1025 MiB" in output
    recorded = json.loads((tmp_path / "out" / "runs.json").read_text())
    assert [*recorded] == [*runs.SETTINGS]
    assert recorded["TE's graphs"]["figures"]["grad norm"] == [*WRONG]


@pytest.mark.parametrize(
    ("fixed", "printed"),
    [
        ((log(WRONG), 0), "differ: grad norm 1 of 8"),
        ((log(RIGHT[:6]), 0), "differ: lm loss 2 of 8, grad norm 2 of 8"),
        ((log(RIGHT[:4]) + "\n" + CRASH, 1), "ended with status 1: RuntimeError: Could not infer dtype"),
        ((log(RIGHT), 3), "ended with status 3"),
    ],
    ids=["another-norm", "fewer-steps", "crash", "late-crash"],
)
def test_a_difference_with_the_fixes_exits_with_1(run: Run, fixed: tuple[str, int], printed: str) -> None:
    status, output = run((log(RIGHT), 0), (log(RIGHT), 0), fixed, options=("--at-once",))
    assert status == 1
    assert f"with te-graph-fixes against graphs off: {printed}" in output
    assert "ms a step" not in output


def test_a_failed_reference_exits_with_2(run: Run) -> None:
    status, output = run((CRASH, 1), (log(RIGHT), 0), (log(RIGHT), 0))
    assert status == 2
    assert "cannot compare: the run without graphs ended with status 1: RuntimeError" in output


def test_a_run_that_takes_too_long_is_ended(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(example.Training, "command", lambda *_: sleep)
    monkeypatch.setattr(sys, "argv", ["example", str(tmp_path), "--out", str(tmp_path / "out"), "--timeout", "0.5"])
    assert example.main() == 2
    assert "graphs off: took longer than --timeout" in capsys.readouterr().err


def test_an_interrupt_exits_with_1(run: Run, runs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "time", Mock(sleep=Mock(side_effect=KeyboardInterrupt), monotonic=time.monotonic))
    assert run(*[(log(RIGHT), 0)] * 3)[0] == 1


@pytest.mark.parametrize("program", ["megatron_lm", "megatron_bridge"])
def test_too_few_iterations_are_wrong_usage(program: str, example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [program, *["checkout"] * (program == "megatron_lm"), "--iterations", "4"])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(program).main()


def norms(**changed: float) -> str:
    return f"gradient norms of step 4: {json.dumps({**NORMS, **changed})}"


def test_norms_are_compared_and_shown_by_kind_of_parameter(run: Run) -> None:
    wrong = norms(**{EXPERT: 0.125})
    status, output = run((log(RIGHT, norms()), 0), (log(RIGHT, wrong), 0), (log(RIGHT, norms()), 0))
    assert status == 0
    assert "TE's graphs against graphs off: differ: norms of main_grad 1 of 2" in output
    assert "| 4 | experts | 0.5 | **0.125** | 0.5 | 0.250 |" in output
    assert "| 4 | Mamba mixer | 0.25 | 0.25 | 0.25 | 1.000 |" in output


@pytest.mark.parametrize(
    ("checked", "status", "printed"),
    [
        (log(RIGHT, EQUAL, OF_CHILD), 0, "fixes on: 2 steps, 8 callables, 1,456 tensors on 2 ranks: all equal"),
        (log(RIGHT, DIFFERENT), 1, "fixes on: 2 steps, 8 callables, 1,456 tensors on 2 ranks: 3 differ, on rank 0"),
        (log(WRONG, EQUAL), 1, "checked against with te-graph-fixes: differ: grad norm 1 of 8"),
        (log(RIGHT), 1, "checked against with te-graph-fixes: the same in every digit"),
        (log(RIGHT, f"{EQUAL}, except 2 that two eager runs do not reproduce"), 0, "except 2"),
        (log(RIGHT, f"{EQUAL}; 1 callable left out"), 1, "left out"),
        (log(RIGHT, f"{EQUAL}; 2 callables not reached"), 1, "not reached"),
    ],
    ids=["equal", "mismatch", "another-training", "no-result", "noisy", "left-out", "not-reached"],
)
def test_a_checked_run_must_be_all_equal_and_unchanged(run: Run, checked: str, status: int, printed: str) -> None:
    programs = [(log(RIGHT), 0), (log(WRONG), 0), (log(RIGHT), 0), (log(WRONG, DIFFERENT), 0), (checked, 0)]
    found, output = run(*programs, options=("--check",))
    assert found == status
    assert printed in output


def test_the_hybrid_model_runs_the_program_that_the_checkout_has(example: ModuleType, tmp_path: Path) -> None:
    def command() -> str:
        model = example.MODELS["hybrid"]
        training = example.train("hybrid", tmp_path, model.programs, [], ["--graphs"], tmp_path)
        return " ".join(training.command("TE's graphs"))

    (tmp_path / "pretrain_mamba.py").touch()
    assert "pretrain_mamba.py --mock-data" in command()
    assert example.MAMBA_SPEC in command()
    (tmp_path / "pretrain_hybrid.py").touch()
    assert "pretrain_hybrid.py --mock-data" in command()
    assert "--spec" not in command()


def test_a_run_of_two_stages_keeps_its_folder(runs: ModuleType, tmp_path: Path) -> None:
    program = ["program.py", "--save", runs.FOLDER]
    training = runs.Training("resume", program, ["--graphs"], tmp_path, stages=(("--exit",), ()))
    shell, option, script = training.command("with te-graph-fixes, checked")
    assert (shell, option) == ("sh", "-c")
    first, second = script.split(" && ")
    folder = tmp_path / "with-te-graph-fixes-checked"
    assert first.endswith(f"program.py --save {folder} --graphs --exit")
    assert second.endswith(f"program.py --save {folder} --graphs")
    assert "te_graph_fixes run --check -- " in first


def test_the_bridge_example_delays_the_capture_without_graphs(
    runs: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bridge = importlib.import_module("megatron_bridge")
    programs = [(log(RIGHT, norms()), 0)] * 3
    commands = []

    def remember(training: object, setting: str) -> list[str]:
        commands.append(original(training, setting)[-4:])
        text, status = programs[0]
        return [sys.executable, "-c", f"import sys; print({text!r}); sys.exit({status})"]

    original = runs.Training.command
    monkeypatch.setattr(runs.Training, "command", remember)
    monkeypatch.setattr(sys, "argv", ["megatron_bridge.py", "--out", str(tmp_path), "--iterations", "9"])
    assert bridge.main() == 0
    rank = [bridge.__file__, bridge.AS_RANK, "9", "2"]
    assert rank in commands
    assert [*rank[1:], "graphs"] in commands
    assert [*bridge.steps(9)] == [4, 8]


def recorded(runs: ModuleType, *texts: tuple[str, int]) -> dict[str, dict[str, object]]:
    """Return the result of each setting, as `megatron_options` stores it. ``texts`` are logs and exit statuses."""
    settings = [*runs.SETTINGS, "with te-graph-fixes, checked"]
    return {
        setting: dataclasses.asdict(runs.Run.read(text, status))
        for setting, (text, status) in zip(settings, texts, strict=False)
    }


VERSIONS = 'versions: {"TE": "2.12.0", "Megatron": "0.16.2"}'
OFF = (log(RIGHT, VERSIONS), 0)


@pytest.mark.parametrize(
    ("others", "cells", "good"),
    [
        ([(log(WRONG), 0), (log(RIGHT), 0), (log(RIGHT, EQUAL), 0)], "1 of 16 | 0 | 1,456 equal", True),
        ([(log(WRONG), 0), (log(RIGHT), 0)], "1 of 16 | 0 | -", True),
        ([(CRASH, 1), (log(RIGHT), 0)], "raises RuntimeError: Could not infer dtype | 0 | -", True),
        ([(log(RIGHT), 0), (log(WRONG), 0)], "0 | 1 of 16 | -", False),
        ([(log(RIGHT), 0), (log(RIGHT), 0), (log(WRONG, EQUAL), 0)], "0 | 0 | changes the training: 1 of 16", False),
    ],
    ids=["fixed", "unchecked", "raises", "wrong", "check-changes"],
)
def test_an_option_is_a_row(runs: ModuleType, others: list[tuple[str, int]], cells: str, good: bool) -> None:
    options = importlib.import_module("megatron_options")
    found = recorded(runs, OFF, *others)
    assert options.is_good(found) is good
    row = options.table([{"multi-token": found}]).splitlines()[-1]
    assert row == f"| multi-token | `--mtp-num-layers 1` | `attn moe` | tensorwise | 2.12.0, 0.16.2 | {cells} |"


def test_an_option_that_fails_without_graphs_is_not_compared(runs: ModuleType) -> None:
    options = importlib.import_module("megatron_options")
    found = recorded(runs, (CRASH, 1), (CRASH, 1), (CRASH, 1))
    assert options.outcomes(found) == ("without graphs: RuntimeError: Could not infer dtype", "-", "-")


def test_the_table_of_earlier_runs(
    example: ModuleType,
    runs: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    options = importlib.import_module("megatron_options")
    print_instead(monkeypatch, runs, OFF, (log(WRONG), 0), OFF, OFF, (log(RIGHT, EQUAL), 0))
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["options", str(tmp_path), "multi-token", "local", "--out", str(out)])
    assert options.main() == 0
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["options", "--table", str(out / "options.json")])
    assert options.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith("| 1 of 16 | 0 | 1,456 equal |") for line in lines)
    assert any("`--cuda-graph-impl local`" in line and line.endswith("| 1 of 16 | 0 | - |") for line in lines)
