"""`grad_input_lifetime.py` on one GPU and `megatron_pipeline.py` on two: what is sent stays intact."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
HERE = Path(__file__).parent


def run(*command: str) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_sends_are_overwritten_without_the_fix_only() -> None:
    output = run(str(HERE / "grad_input_lifetime.py"), "check")
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert any(line["overwritten"][0] for line in lines if line["setting"] == "without")
    for line in lines:
        if line["setting"] != "without":
            assert line["overwritten"] == line["received_wrong"] == [0, 0]
    memory = {(line["schedule"], line["setting"]): line["pool_mib"] for line in lines}
    for schedule in ("model chunks", "model chunks of one layer", "one layer"):
        assert memory[schedule, "with"] == memory[schedule, "without"]


def test_a_pipelined_megatron_model_is_exact_with_all_fixes_only() -> None:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not installed")
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, has {torch.cuda.device_count()}")
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    assert "'all fixes': 0" in run(*launcher, str(HERE / "megatron_pipeline.py"))
