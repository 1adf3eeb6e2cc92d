"""Test ``python -m tests.verify``: its cases on the simulator, its verdicts, and child processes that fail or hang."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from te_graph_fixes.fixes import CATALOGUE
from tests.support import published
from tests.support.child import ROOT, gpu, on_simulator, outcome, python
from tests.support.child import measured as measured_in_child
from tests.verify import runner
from tests.verify.__main__ import main
from tests.verify.cases import CASES, PRESWIZZLE, Case, select
from tests.verify.runner import Child, Outcome, Row

pytestmark = pytest.mark.te

BESIDE = (
    *("recompute-in-an-autocast", "recompute-after-another", "operation-alone", "last-send-before-cooldown"),
    *("fp8-params-of-master", "fp8-experts-no-grad", "inference-and-eager-training", "cached-after-other-recipe"),
    *("checkpoint-after-bf16", "forward-method-after-others", "ops-after-other-recipe", "fp8-params-block-no-grad"),
    *("inference-and-training-in-order", "norm-and-bias", "delayed-bias", "delayed-experts-in-order"),
    *("delayed-mlp-bias", "delayed-experts-bias", "other-module-first", "recomputed-weights", "experts-not-cached"),
)
"""Cases that are not quick, but test edits of fixes that no quick case tests."""


def marks(case: Case) -> tuple[pytest.MarkDecorator, ...]:
    if gpu(case) == "hopper" and case.quick:
        return ()
    return (pytest.mark.full,) if gpu(case) == "hopper" and case.name in BESIDE else (pytest.mark.slow,)


SIMULATED = [pytest.param(case, marks=marks(case), id=f"{case.name}-{gpu(case)}") for case in CASES.values()]
APPLICABLE_FIXES = published.te("installed").needed

RIGHT, WRONG = Outcome("measured", 0.0), Outcome("measured", 1.0)
CRASH, SKIP = Outcome("failed", detail="KeyError: -1"), Outcome("skipped", detail="no FP8")
HANG = Outcome("unmeasured", detail="no result in 60 s")
UNABLE = Outcome("unable", detail="ImportError: no such recipe")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow child processes to import ``tests`` and every module that this process can import."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))


@pytest.mark.parametrize("case", SIMULATED)
def test_cases_on_the_simulator(case: Case) -> None:
    row = Row(case, *(outcome(case, TE_GRAPH_FIXES=switch, TE_SIMULATOR_GPU=gpu(case)) for switch in ("off", "on")))
    if row.skipped:
        pytest.skip(row.verdict)
    assert row.with_fixes.correct, row.with_fixes
    if case.quick or case.name in BESIDE or not APPLICABLE_FIXES & set(case.fixes):
        assert row.verdict == ("fixed" if APPLICABLE_FIXES & set(case.fixes) else "not affected")


@pytest.mark.skipif(PRESWIZZLE not in APPLICABLE_FIXES, reason="TE before 2.18")
def test_cached_nvfp4_weights_show_that_they_are_swizzled_twice() -> None:
    cases = "experts-nvfp4", "experts-fit-nvfp4", "linear-nvfp4", "flag-set-by-caller-nvfp4"
    found = measured_in_child(*cases, TE_GRAPH_FIXES_DISABLE=PRESWIZZLE, TE_SIMULATOR_GPU="blackwell-rtx")
    assert all(found[case]["error"] > 0.1 for case in cases), found


def test_every_fix_has_a_case_and_a_quick_one() -> None:
    for fix_id in CATALOGUE:
        assert any(fix_id in case.fixes for case in CASES.values()), fix_id
        assert any(fix_id in case.fixes and case.quick for case in CASES.values()), fix_id


@pytest.mark.parametrize(
    ("without", "with_fixes", "verdict", "ok"),
    [
        (WRONG, RIGHT, "fixed", True),
        (CRASH, RIGHT, "fixed", True),
        (RIGHT, RIGHT, "not affected", True),
        (WRONG, WRONG, "STILL WRONG", False),
        (RIGHT, CRASH, "STILL WRONG", False),
        (SKIP, SKIP, "skipped: no FP8", True),
        (RIGHT, SKIP, "not measured with the fixes: no FP8", False),
        (WRONG, HANG, "not measured with the fixes: no result in 60 s", False),
        (HANG, RIGHT, "not measured without the fixes: no result in 60 s", True),
        (HANG, WRONG, "STILL WRONG", False),
        (UNABLE, UNABLE, "could not run: ImportError: no such recipe", False),
        (RIGHT, UNABLE, "not measured with the fixes: ImportError: no such recipe", False),
        (None, RIGHT, "correct", True),
        (None, WRONG, "STILL WRONG", False),
        (None, SKIP, "skipped: no FP8", True),
        (None, HANG, "not measured with the fixes: no result in 60 s", False),
    ],
)
def test_verdicts(without: Outcome | None, with_fixes: Outcome, verdict: str, ok: bool) -> None:
    row = Row(CASES["linear-bf16"], without, with_fixes)
    assert (row.verdict, row.ok) == (verdict, ok)


def test_selection() -> None:
    assert select([]) == list(CASES.values())
    assert [case.name for case in select(["linear-bf16"])] == ["linear-bf16"]
    assert {case.name for case in select(["warmup-reset"])} >= {"linear-bf16", "experts-fp8-delayed"}
    assert 0 < len(select([], quick=True)) < len(CASES)
    with pytest.raises(ValueError, match=r"'nonsense'\. Run `te-graph-fixes list`"):
        select(["nonsense"])
    with pytest.raises(ValueError, match="no case of linear-bf16 is quick; omit --quick"):
        select(["linear-bf16"], quick=True)


def fake(script: str, **options: object) -> Outcome:
    """Return the outcome of a case if its child process runs ``script`` instead of `tests.verify.child`."""
    child = Child(os.environ, (sys.executable, "-c", script))
    try:
        return child.measure(CASES["linear-bf16"], **options)  # type: ignore[arg-type]
    finally:
        child.close()


def test_a_child_that_hangs_is_killed() -> None:
    found = fake("import time; time.sleep(60)", limit=0.5)
    assert (found.outcome, found.detail) == ("unmeasured", "no result in 0.5 s")


def test_a_child_that_dies_is_a_failure_with_its_last_words() -> None:
    found = fake("import os, sys; print('oh no', file=sys.stderr, flush=True); os.kill(os.getpid(), 11)")
    assert found.outcome == "failed"
    assert found.detail == "the process ended with status -11: oh no"


def child(*arguments: str, prelude: str = "", **environment: str) -> list[dict[str, object]]:
    """Run ``prelude`` and `tests.verify.child` on the simulator. Return the parsed output lines of the child."""
    program = f"{prelude}\nimport runpy, sys\nsys.argv = ['child', *{list(arguments)!r}]\n"
    program += "runpy.run_module('tests.verify.child', run_name='__main__')"
    done = on_simulator("-c", program, imported=(), **environment)
    assert done.stdout, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("prelude", "unable"),
    [
        (
            "import transformer_engine.pytorch.graph as graph; del graph.is_graph_capturing",
            {"failed-capture", "linear-bf16", "fp8-params-of-master"},
        ),
        (
            "import transformer_engine.pytorch.tensor.utils as utils; del utils.cast_master_weights_to_fp8",
            {"fp8-params-of-master"},
        ),
        (
            "import sys, transformer_engine.pytorch; sys.modules['transformer_engine.pytorch.quantization'] = None",
            {"failed-capture", "linear-bf16", "fp8-params-of-master"},
        ),
    ],
)
def test_a_case_could_not_run_where_te_does_not_have_what_it_imports(prelude: str, unable: set[str]) -> None:
    lines = child("failed-capture", "linear-bf16", "fp8-params-of-master", prelude=prelude)
    assert len(lines) == 3
    for line in lines:
        assert line["outcome"] == ("unable" if line["case"] in unable else "measured"), line
        assert not line["last"]


def test_an_import_error_of_te_is_a_failure() -> None:
    prelude = (
        "import transformer_engine.pytorch as te\n"
        "def forward(*_, **__): import transformer_engine.pytorch.nothing\n"
        "te.Linear.forward = forward"
    )
    (line,) = child("linear-bf16", prelude=prelude)
    assert line["outcome"] == "failed", line


def test_the_child_stops_after_a_failure() -> None:
    broken = Case("broken", (), "programs:compare", {"modules": ("NoSuchModule",)})
    (line,) = child(broken.to_json(), "linear-bf16")
    assert (line["outcome"], line["last"]) == ("failed", True)
    assert str(line["detail"]).startswith("KeyError: ")


@pytest.mark.parametrize("also", ["", ",failed-capture-state"])
def test_the_child_stops_where_a_refusal_leaves_te_in_a_capture(also: str) -> None:
    lines = child("wgrad-before-dgrad", "linear-bf16", TE_GRAPH_FIXES=f"backward-dw-order,capture-without-warmup{also}")
    assert [line["last"] for line in lines] == ([False, False] if also else [True])
    assert lines[0]["error"] == 0.0


@pytest.mark.parametrize("where", ["Case.measure", "torch.cuda.get_device_name"])
def test_running_out_of_memory_is_not_a_measurement(where: str) -> None:
    prelude = (
        "import torch\nfrom tests.verify.cases import Case\n"
        "def fail(*_): raise torch.AcceleratorError('CUDA error: out of memory')\n"
        f"{where} = fail"
    )
    (line,) = child("linear-bf16", prelude=prelude)
    assert line["outcome"] == "unmeasured"
    assert line["detail"] == "AcceleratorError: CUDA error: out of memory"


def test_te_that_does_not_import_is_said_for_each_case(tmp_path: Path) -> None:
    package = tmp_path / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "pytorch" / "__init__.py").write_text("raise ImportError('libtransformer_engine.so: not found')")
    command = "-m", "tests.verify.child", "linear-bf16", "plain-grad"
    done = python(*command, path=tmp_path, TE_GRAPH_FIXES="off")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["case"] for line in lines] == ["linear-bf16", "plain-grad"]
    for line in lines:
        assert line["outcome"] == "unmeasured"
        assert (
            line["detail"] == "transformer_engine cannot be imported: ImportError: libtransformer_engine.so: not found"
        )


def measured(monkeypatch: pytest.MonkeyPatch, without: Outcome, with_fixes: Outcome) -> None:
    """Replace `runner.no_gpu` and `runner.measure`, so that each case gets these outcomes without a run."""
    monkeypatch.setattr(runner, "no_gpu", lambda: None)
    monkeypatch.setattr(runner, "measure", lambda cases, *_, **__: [Row(case, without, with_fixes) for case in cases])


def test_the_table_and_the_status(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    measured(monkeypatch, CRASH, RIGHT)
    assert main(["wgrad-before-dgrad"]) == 0
    out = capfd.readouterr().out
    assert out.splitlines()[0].split("  ")[0] == "FIX"
    assert out.splitlines()[1].split() == ["backward-dw-order", "wgrad-before-dgrad", "KeyError:", "-1", "0", "fixed"]
    measured(monkeypatch, WRONG, HANG)
    assert main(["linear-bf16", "plain-grad"]) == 1
    captured = capfd.readouterr()
    assert len(captured.out.splitlines()) == 4
    assert "te-graph-fixes: linear-bf16: not measured with the fixes: no result in 60 s" in captured.err.splitlines()


def test_skipped_cases_are_named(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    measured(monkeypatch, SKIP, SKIP)
    assert main(["linear-bf16", "linear-mxfp8"]) == 0
    assert "skipped (no FP8): linear-bf16, linear-mxfp8" in capfd.readouterr().out.splitlines()
    assert main(["--json", "linear-mxfp8"]) == 0
    assert json.loads(capfd.readouterr().out)["skipped"] == {"no FP8": ["linear-mxfp8"]}


@pytest.mark.parametrize(("others", "status"), [(RIGHT, 3), (HANG, 1), (WRONG, 1)])
def test_cases_that_could_not_run_have_their_own_status(
    others: Outcome, status: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def rows(cases: list[Case], *_: object, **__: object) -> list[Row]:
        return [Row(cases[0], UNABLE, UNABLE), *(Row(case, others, others) for case in cases[1:])]

    measured(monkeypatch, RIGHT, RIGHT)
    monkeypatch.setattr(runner, "measure", rows)
    assert main(["linear-bf16", "plain-grad"]) == status
    captured = capfd.readouterr()
    assert "could not run: ImportError: no such recipe" in captured.out
    assert "te-graph-fixes: linear-bf16: could not run: ImportError: no such recipe" in captured.err.splitlines()


def test_json_holds_no_infinity(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    measured(monkeypatch, Outcome("measured", float("inf"), measures={"errors": {"wgrads": [float("nan")]}}), RIGHT)
    assert main(["--json", "linear-bf16"]) == 0
    found = json.loads(capfd.readouterr().out, parse_constant=pytest.fail)
    assert found["ok"] is True
    assert found["cases"][0]["without"]["error"] == "inf"
    assert found["cases"][0]["verdict"] == "fixed"


def test_no_gpu_is_said_at_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(runner, "no_gpu", lambda: "there is no NVIDIA driver (libcuda.so.1)")
    assert main([]) == 2
    assert capfd.readouterr().err == "te-graph-fixes: `verify` needs a GPU: there is no NVIDIA driver (libcuda.so.1)\n"


def test_the_parent_imports_neither_torch_nor_te() -> None:
    code = "import sys; from tests.verify.__main__ import main; main([])\n"
    code += "print({'torch', 'transformer_engine'} & set(sys.modules))"
    assert python("-c", code).stdout == "set()\n"


def test_the_users_choice_of_fixes_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_GRAPH_FIXES", "warmup-reset")
    assert runner.environment("with")["TE_GRAPH_FIXES"] == "warmup-reset"
    assert runner.environment("without")["TE_GRAPH_FIXES"] == "off"
    monkeypatch.setenv("TE_GRAPH_FIXES", "off")
    assert runner.environment("with")["TE_GRAPH_FIXES"] == "on"


def test_progress_says_what_was_measured_and_how_much_there_is(capfd: pytest.CaptureFixture[str]) -> None:
    answer = {"case": "", "last": False, "outcome": "measured", "error": 0.0, "applied": [], "seconds": 0.0}
    child = f"import sys\nfor line in sys.stdin: print({json.dumps(json.dumps(answer))}, flush=True)"
    cases = list(CASES.values())[:3]
    rows = runner.measure(cases, workers=4, command=[sys.executable, "-c", child])
    assert all(row.ok for row in rows)
    first, *results = capfd.readouterr().err.splitlines()
    assert first == "6 runs of 3 cases in 4 processes. Importing TransformerEngine takes a while."
    assert sorted(line.split("]")[0] for line in results) == [f"[{number}/6" for number in range(1, 7)]
    assert all(re.fullmatch(r"\[\d/6\] \S+, with(out)? the fixes: 0", line) for line in results)
