"""``subclass-autocast`` on the simulator: eager calls after a capture of a class and its subclass."""

from __future__ import annotations

import json
from typing import Any

import pytest

from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.source import Source
from tests.child import simulate

FIX = CATALOGUE["subclass-autocast"]
NEEDED = FIX.verdict(Source.installed()).verdict == "applicable"


def run(setting: str) -> dict[str, Any]:
    """``tests/gpu/subclass_autocast.py`` in a child process on the simulator."""
    output = simulate("tests/gpu/subclass_autocast.py", TE_GRAPH_FIXES=setting)
    return json.loads(output.splitlines()[-1])


def test_eager_calls_are_as_before_the_capture() -> None:
    found = run(FIX.id)
    assert found["left"] == []
    assert found["error"] == 0.0


@pytest.mark.skipif(not NEEDED, reason="this TE has the corrected code")
def test_without_the_fix_the_subclass_loses_fp8() -> None:
    found = run("off")
    assert found["left"] == ["MoE"]
    assert found["error"] > 0.01
