"""``wgrad-hook-order`` on the simulator: the order in which gradient hooks are run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.source import Source

FIX = CATALOGUE["wgrad-hook-order"]
NEEDED = FIX.verdict(Source.installed()).verdict == "applicable"
HOOKS_NEEDED = CATALOGUE["backward-dw-hooks"].verdict(Source.installed()).verdict == "applicable"
ROOT = Path(__file__).parent.parent


def run(setting: str) -> dict[str, Any]:
    """``tests/gpu/wgrad_hook_order.py`` in a child process on the simulator."""
    command = [sys.executable, "-m", "tests.simulator", "tests/gpu/wgrad_hook_order.py"]
    path = os.pathsep.join([*filter(None, sys.path), str(ROOT)])
    environment = {**os.environ, "TE_GRAPH_FIXES": setting, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_hooks_are_run_in_the_order_of_the_forwards() -> None:
    found = run(FIX.id + ",backward-dw-hooks")
    assert found["order"] == list(range(8))


@pytest.mark.skipif(not NEEDED, reason="this TE has the corrected code")
@pytest.mark.skipif(HOOKS_NEEDED, reason="this TE runs no hooks of its own after a replay")
def test_without_the_fix_they_are_in_the_order_of_addresses() -> None:
    # One process in 40,000 has them in the right order by chance.
    assert run("off")["order"] != list(range(8))
