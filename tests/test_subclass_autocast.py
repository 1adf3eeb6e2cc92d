"""``subclass-autocast`` on the simulator: eager calls after a capture of a class and its subclass."""

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

FIX = CATALOGUE["subclass-autocast"]
NEEDED = FIX.verdict(Source.installed()).verdict == "applicable"
ROOT = Path(__file__).parent.parent


def run(setting: str) -> dict[str, Any]:
    """``tests/gpu/subclass_autocast.py`` in a child process on the simulator."""
    command = [sys.executable, "-m", "tests.simulator", "tests/gpu/subclass_autocast.py"]
    path = os.pathsep.join([*filter(None, sys.path), str(ROOT)])
    environment = {**os.environ, "TE_GRAPH_FIXES": setting, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_eager_calls_are_as_before_the_capture() -> None:
    found = run(FIX.id)
    assert found["left"] == []
    assert found["error"] == 0.0


@pytest.mark.skipif(not NEEDED, reason="this TE has the corrected code")
def test_without_the_fix_the_subclass_loses_fp8() -> None:
    found = run("off")
    assert found["left"] == ["MoE"]
    assert found["error"] > 0.01
