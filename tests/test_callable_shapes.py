"""``none-outputs`` and ``tuple-samples`` on the simulator."""

from __future__ import annotations

import json
from typing import Any

import pytest

from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.source import Source
from tests.child import simulate

IDS = {"none-outputs": "none-outputs", "none-outputs in order": "none-outputs", "tuple-samples": "tuple-samples"}
ERRORS = {"none-outputs": "AttributeError: 'NoneType' object has no attribute", "tuple-samples": "AssertionError"}


def run(setting: str) -> dict[str, dict[str, Any]]:
    """``tests/gpu/callable_shapes.py`` in a child process on the simulator."""
    output = simulate("tests/gpu/callable_shapes.py", TE_GRAPH_FIXES=setting)
    return {line["case"]: line for line in map(json.loads, output.splitlines())}


@pytest.fixture(scope="module")
def fixed() -> dict[str, dict[str, Any]]:
    return run("none-outputs,tuple-samples")


@pytest.fixture(scope="module")
def unpatched() -> dict[str, dict[str, Any]]:
    return run("off")


@pytest.mark.parametrize("case", IDS)
def test_replay_gives_what_eager_gives(fixed: dict[str, dict[str, Any]], case: str) -> None:
    assert fixed[case].get("error") == 0.0


@pytest.mark.parametrize("case", IDS)
def test_without_the_fix_capturing_fails(unpatched: dict[str, dict[str, Any]], case: str) -> None:
    if CATALOGUE[IDS[case]].verdict(Source.installed()).verdict != "applicable":
        pytest.skip("this TE has the corrected code")
    assert unpatched[case]["failed"].startswith(ERRORS[IDS[case]])
