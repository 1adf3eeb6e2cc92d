"""Test the simulator. Most tests are the checks of ``tests/simulator/checks``, run in a child process."""

from __future__ import annotations

import ast
import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.child import ROOT, on_simulator, python, simulate

pytestmark = pytest.mark.te

EVERYWHERE = ROOT / "tests" / "simulator" / "everywhere"
PARTS = ("graphs", "extension", "blocks")
GPUS = ("hopper", "blackwell", "blackwell-rtx")


def names(part: str) -> list[str]:
    tree = ast.parse((ROOT / "tests" / "simulator" / "checks" / f"{part}.py").read_text())
    functions = (node.name for node in tree.body if isinstance(node, ast.FunctionDef))
    return [f"{part}.{name}" for name in functions if name.startswith("check_")]


@functools.cache
def results(part: str, gpu: str = "hopper") -> dict[str, str | None]:
    done = on_simulator("-m", "tests.simulator.checks", part, TE_GRAPH_FIXES="off", TE_SIMULATOR_GPU=gpu)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr
    return {line["check"]: line["error"] for line in lines}


@pytest.mark.parametrize("name", [name for part in PARTS for name in names(part)])
def test_check(name: str) -> None:
    error = results(name.partition(".")[0])[name]
    assert error is None, error


@pytest.mark.parametrize("gpu", GPUS[1:])
@pytest.mark.parametrize("name", names("blocks"))
def test_check_of_blocks_on_another_gpu(name: str, gpu: str) -> None:
    error = results("blocks", gpu)[name]
    assert error is None, error


@pytest.mark.parametrize(("fixes", "wanted"), [("off", math.inf), ("on", 0.0)])
def test_graphs_that_use_freed_memory_get_what_others_write_there(fixes: str, wanted: float) -> None:
    done = on_simulator("-m", "tests.verify.child", "cached-after-other-recipe", TE_GRAPH_FIXES=fixes)
    assert json.loads(done.stdout)["error"] == wanted, done.stderr


def verify(gpu: str, *arguments: str) -> dict[str, Any]:
    """Return the parsed output of ``python -m tests.verify`` on ``gpu``. Fail unless each case passes or is skipped."""
    command = ("-m", "tests.verify", "--json", *arguments)
    done = python(*command, path=EVERYWHERE, timeout=3600, TE_SIMULATOR_GPU=gpu)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["gpu"] == f"simulated {gpu} GPU"
    for case in found["cases"]:
        assert case["with"]["error"] == 0.0 or case["verdict"].startswith("skipped: "), case
    return found


@pytest.mark.full
def test_verify_on_blackwell() -> None:
    found = verify("blackwell", "linear-mxfp8", "failed-capture")
    assert found["skipped"] == {}
    assert found["cases"][0]["verdict"] == "fixed"  # the case failed-capture


@pytest.mark.full
def test_verify_leaves_out_what_a_gpu_does_not_have() -> None:
    found = verify("blackwell-rtx", "linear-mxfp8", "cached-nvfp4")
    ((why, cases),) = found["skipped"].items()
    assert "not supported on 12.0+ architectures" in why
    assert cases == ["linear-mxfp8"]


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
def test_verify_with_all_cases(gpu: str) -> None:
    verify(gpu, "--limit", "600")


def test_a_script_runs_as_main_with_its_arguments_and_folder(tmp_path: Path) -> None:
    (tmp_path / "sibling.py").write_text("value = 42\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, sibling, torch\nprint(__name__, sys.argv[1:], sibling.value, torch.ones(1).is_cuda)\n"
    )
    assert simulate(script, "-x", "y", imported=()) == "__main__ ['-x', 'y'] 42 True\n"


def test_a_module_runs_as_main_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "some_module.py").write_text("import sys\nprint(__name__, sys.argv)\n")
    said = simulate("-m", "some_module", "-m", "z", path=tmp_path, imported=())
    assert said == f"__main__ {[str(tmp_path / 'some_module.py'), '-m', 'z']}\n"


def test_no_program_is_an_error() -> None:
    done = python("-m", "tests.simulator")
    assert done.returncode == 1
    assert done.stderr.startswith("usage: ")


def test_installing_after_transformer_engine_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(
        "import os\n"
        "os.environ['NVTE_PROJECT_BUILDING'] = '1'\n"
        "import transformer_engine.common\n"
        "from tests.simulator import install\n"
        "install()\n"
    )
    done = python(script, TE_GRAPH_FIXES="off")
    assert "must be called before transformer_engine is imported" in done.stderr
