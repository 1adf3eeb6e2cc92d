"""`megatron_moe.py` on the TransformerEngine (TE) of this machine: every gradient is exactly the eager one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
NEEDED = ("torch", "transformer_engine", "megatron")


@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed", "fp8-current"])
def test_graphs_give_the_eager_gradients(recipe: str) -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    program = Path(__file__).with_name("megatron_moe.py")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(program.parents[2]), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(program), recipe]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True).stdout
    found = json.loads(output.splitlines()[-1])
    assert found.get("eager_repeats"), found
    assert found["losses"] == found["eager_losses"]
    assert [step for step in found["steps"] if any(error != 0.0 for _, error in step.values())] == []
