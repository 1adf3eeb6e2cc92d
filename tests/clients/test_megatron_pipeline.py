"""A pipelined Megatron-Core model with expert-parallel overlap and a late receiver, on the simulator."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.te,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-Core is not installed"),
]
ROOT = Path(__file__).parents[2]
STAGES = 2


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def test_main_grads_of_all_ranks_equal_eager_runs() -> None:
    environment = {
        **os.environ,
        "WORLD_SIZE": str(STAGES),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(ROOT)]),
    }
    command = [sys.executable, "-m", "tests.simulator", "tests/support/megatron_on_simulator.py"]
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(STAGES)
    ]
    try:
        ended = [(*process.communicate(timeout=600), process.returncode) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for rank, (output, errors, code) in enumerate(ended):
        assert code == 0, errors
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        different = {line["setting"]: [step["different"] for step in line["steps"]] for line in lines}
        assert {line["rank"] for line in lines} == {rank}
        assert all(line["eager_again_different"] == line["before_capture_different"] == 0 for line in lines)
        assert min(different["no fixes"] + different["all others"]) > 0
        assert different["all fixes"] == [0, 0, 0]


def test_more_microbatches_than_captured_raise_by_name() -> None:
    """Capture four microbatches and run four, two and eight, in two ranks of two virtual stages each."""
    program = ["-m", "tests.simulator", "tests/support/megatron_on_simulator.py", "megatron_microbatches.py"]
    done = subprocess.run(
        [sys.executable, "tests/gpu/megatron_microbatches.py", str(STAGES), *program],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cannot be replayed: the" in done.stdout
