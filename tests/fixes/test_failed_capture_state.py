"""``failed-capture-state`` on the simulator: a capture is made to fail at each place where it can."""

from __future__ import annotations

import json
from typing import Any

import pytest

from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.source import Source
from tests.support.child import simulate

FIX = CATALOGUE["failed-capture-state"]
NEEDED = FIX.verdict(Source.installed()).verdict == "applicable"
ERRORS = {
    "warmup-forward": "PlannedError",
    "warmup-backward": "PlannedError",
    "capture-forward": "PlannedError",
    "capture-backward": "PlannedError",
    "capture-wgrad": "PlannedError",
    "spoiled-forward": "GraphError: CUDA error: operation not permitted when stream is capturing",
    "spoiled-backward": "GraphError: CUDA error: operation not permitted when stream is capturing",
    "not-a-module": "AttributeError",
    "enabled": ("ValueError: enabled length", "AssertionError: enabled length"),
}
"""The exception that the user must see, by the place of the failure."""


def run(setting: str, *places: str) -> dict[str, dict[str, Any]]:
    """``tests/gpu/failed_capture_state.py`` for some places, one after the other, in a child process."""
    output = simulate("tests/gpu/failed_capture_state.py", *places, TE_GRAPH_FIXES=setting)
    return {line["place"]: line for line in map(json.loads, output.splitlines())}


@pytest.fixture(scope="module")
def fixed() -> dict[str, dict[str, Any]]:
    return run(FIX.id, *ERRORS)


@pytest.mark.parametrize("place", ERRORS)
def test_a_failed_capture_leaves_everything_as_it_was(fixed: dict[str, dict[str, Any]], place: str) -> None:
    found = fixed[place]
    assert found["seen"].startswith(ERRORS[place])
    assert found["changed"] == []
    assert found["eager"] == 0.0
    assert found["next"] == 0.0


@pytest.mark.skipif(not NEEDED, reason="this TE has the corrected code")
def test_without_the_fix_the_process_is_damaged() -> None:
    found = run("off", "spoiled-backward")["spoiled-backward"]
    assert "operation failed due to a previous error during capture" in found["seen"]
    assert {"garbage collection", "capturing flag", "call", "first microbatch", "FP8 scales"} <= set(found["changed"])
    assert found["eager"] > 0.01


@pytest.mark.skipif(not NEEDED, reason="this TE has the corrected code")
def test_without_the_fix_a_pending_wgrad_is_taken_for_the_next_one() -> None:
    found = run("off", "capture-wgrad")["capture-wgrad"]
    assert "delayed wgrads" in found["changed"]
    assert found["eager"] > 0.01
