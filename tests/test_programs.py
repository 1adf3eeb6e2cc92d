"""Fixes that are about several modules and what happens to them between replays, on the simulator: whole programs."""

from __future__ import annotations

import json

import pytest

from tests.child import simulate

SPOILT = {
    "nested-autocast": ("nested-modules", "subclass-inside", "enabled-by-module", "bf16-inside"),
    "backward-amax-reduction": ("frozen-first", "self-distillation", "plain-torch-first", "graphed-teacher"),
    "rng-states-at-replay": ("other-rng-states", "frozen-rng-states"),
    "fp8-state-at-replay": (
        "forward-method",
        "own-autocast",
        "checkpoint",
        "operations-in-bf16",
        "bf16-graph-used-eagerly-later",
        "eager-before-replay",
    ),
}
"""Programs that each fix is needed for."""


def run(setting: str, *programs: str, without: str = "") -> dict[str, float | str]:
    """The largest error of each program, or the exception that ends it."""
    output = simulate("tests/gpu/programs.py", *programs, TE_GRAPH_FIXES=setting, TE_GRAPH_FIXES_DISABLE=without)
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"case"')]
    return {
        "/".join(line["case"]): line["failed"] if "failed" in line else max(line["errors"].values()) for line in lines
    }


def test_programs_are_as_without_graphs() -> None:
    found = run("on")
    assert len(found) > 20
    assert set(found.values()) == {0.0}, found


@pytest.mark.full
def test_with_current_scaling_too() -> None:
    found = run("on", "nested-operations", "own-autocast-in-another-delayed", "frozen-first")
    assert set(found.values()) == {0.0}, found


@pytest.mark.parametrize("fix_id", SPOILT)
def test_without_the_fix_they_differ(fix_id: str) -> None:
    found = run("on", *SPOILT[fix_id], without=fix_id)
    delayed = [found[f"{name}/fp8-delayed"] for name in SPOILT[fix_id]]
    assert all(isinstance(error, str) or error > 0.05 for error in delayed), found
