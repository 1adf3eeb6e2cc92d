"""What `examples/megatron_lm.py` concludes from the logs of its three runs. The programs here only print such logs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
RIGHT = ("3.000", "2.000", "1.000", "0.900", "0.800", "0.700", "0.600", "0.500")
WRONG = (*RIGHT[:4], "0.801", *RIGHT[5:])
LINE = " [a time] iteration {0:8}/{1:8} | elapsed time per iteration (ms): {2} | lm loss: 9.2E+00 | grad norm: {3} |"
CRASH = "[rank0]: Traceback (most recent call last):\n[rank0]: RuntimeError: Could not infer dtype"


def log(norms: tuple[str, ...]) -> str:
    lines = [LINE.format(i + 1, len(norms), 100.0 + i, norm) for i, norm in enumerate(norms)]
    return "\n".join([*lines, "", "peak memory of rank 0: 1024 MiB", "peak memory of rank 1: 1025 MiB"])


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("megatron_lm", ROOT / "examples" / "megatron_lm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "megatron_lm", module)
    spec.loader.exec_module(module)
    (tmp_path / "pretrain_gpt.py").touch()
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: name)
    return module


def run(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *programs: tuple[str, int],
    at_once: bool = False,
) -> int:
    """The exit status, where the run of each setting prints a text and ends with a status."""
    by_setting = dict(zip(example.SETTINGS, programs, strict=True))

    def command(_: object, setting: str) -> list[str]:
        text, status = by_setting[setting]
        return [sys.executable, "-c", f"import sys; print({text!r}); sys.exit({status})"]

    monkeypatch.setattr(example, "command", command)
    arguments = [str(folder), "--out", str(folder / "out"), *(["--at-once"] if at_once else [])]
    monkeypatch.setattr(sys, "argv", ["megatron_lm.py", *arguments])
    status: int = example.main()
    return status


def test_equal_runs_end_with_0_and_are_said_to_be_the_same(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = [(log(RIGHT), 0), (log(WRONG), 0), (log(RIGHT), 0)]
    assert run(example, monkeypatch, tmp_path, *programs) == 0
    output = capsys.readouterr().out
    assert "TE's graphs against graphs off: differ: grad norm 1 of 8" in output
    assert "with te-graph-fixes against graphs off: the same in every digit" in output
    assert "| 5 | 9.2E+00 | 9.2E+00 | 9.2E+00 | 0.800 | **0.801** | 0.800 |" in output
    assert "graphs off: 106.0 ms a step (median of 3), peak memory 1025 MiB" in output
    recorded = json.loads((tmp_path / "out" / "runs.json").read_text())
    assert [*recorded] == [*example.SETTINGS]
    assert recorded["TE's graphs"]["figures"]["grad norm"] == [*WRONG]


@pytest.mark.parametrize(
    ("fixed", "said"),
    [
        ((log(WRONG), 0), "differ: grad norm 1 of 8"),
        ((log(RIGHT[:6]), 0), "differ: lm loss 2 of 8, grad norm 2 of 8"),
        ((log(RIGHT[:4]) + "\n" + CRASH, 1), "ended with status 1: RuntimeError: Could not infer dtype"),
        ((log(RIGHT), 3), "ended with status 3"),
    ],
    ids=["another-norm", "fewer-steps", "crash", "late-crash"],
)
def test_what_is_not_equal_with_the_fixes_ends_with_1(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fixed: tuple[str, int],
    said: str,
) -> None:
    assert run(example, monkeypatch, tmp_path, (log(RIGHT), 0), (log(RIGHT), 0), fixed, at_once=True) == 1
    output = capsys.readouterr().out
    assert f"with te-graph-fixes against graphs off: {said}" in output
    assert "ms a step" not in output


def test_without_a_reference_there_is_no_answer(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(example, monkeypatch, tmp_path, (CRASH, 1), (log(RIGHT), 0), (log(RIGHT), 0)) == 2
    assert "cannot compare: the run without graphs ended with status 1: RuntimeError" in capsys.readouterr().out


def test_a_run_that_takes_too_long_is_ended(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(example, "command", lambda *_: [sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(sys, "argv", ["example", str(tmp_path), "--out", str(tmp_path / "out"), "--timeout", "0.5"])
    assert example.main() == 2
    assert "graphs off: took longer than --timeout" in capsys.readouterr().err


def test_the_picture_is_drawn_from_recorded_runs(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    run(example, monkeypatch, tmp_path, (log(RIGHT), 0), (log(WRONG), 0), (log(RIGHT), 0))
    assert (tmp_path / "out" / "megatron-lm.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(sys, "argv", ["example", "--draw", str(tmp_path / "both.png"), f"TE 2.12.0={tmp_path / 'out'}"])
    assert example.main() == 0
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
