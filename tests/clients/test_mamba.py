"""Megatron-Core's scope ``mamba`` through TransformerEngine's graphs, on the simulator."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.clients.test_megatron_pipeline import free_port
from tests.support.child import ROOT, simulate

pytestmark = [
    pytest.mark.te,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-Core is not installed"),
]


@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed", "fp8-current"])
@pytest.mark.parametrize("name", ["mamba", "mamba-late"])
def test_training_equals_eager_training(name: str, recipe: str) -> None:
    program = ROOT / "tests" / "support" / "mamba_on_simulator.py"
    output = simulate(program, name, recipe, MASTER_PORT=str(free_port()))
    assert json.loads(output.splitlines()[-1])["verdict"] == "equal"
