"""Delete graphs of Megatron-Core before weights are offloaded, and capture them again, on the simulator."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.test_megatron_pipeline import free_port

pytestmark = [
    pytest.mark.te,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-Core is not installed"),
]
ROOT = Path(__file__).parents[2]


def test_recapture_is_bit_identical_and_kept_graphs_raise() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.simulator",
            "tests/support/megatron_moe_on_simulator.py",
            "bf16",
            "megatron_rounds",
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(ROOT)]),
        },
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    runs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stdout + done.stderr
    assert [run["steps"] for run in runs] == [6, 6, 2]
    assert "capture again" in runs[-1]["raised"].lower()
