"""``param-grad-lifetime``, ``fused-dummy-copies`` and ``parameter-hooks`` on the simulator: what parameters get.

The cases are those of ``te-graph-fixes verify``.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.source import Source
from tests.child import on_simulator

CASES = ("tied-weight", "fused-mlps", "parameter-hooks")
NEEDED = {fix for fix in CATALOGUE if CATALOGUE[fix].verdict(Source.installed()).verdict == "applicable"}
FIXES = {
    "tied-weight": {"param-grad-lifetime"},
    "fused-mlps": {"param-grad-lifetime", "fused-dummy-copies"},
    "parameter-hooks": {"parameter-hooks"},
}


@functools.cache
def run(setting: str) -> dict[str, Any]:
    """What the cases measure in a child process on the simulator."""
    done = on_simulator("-m", "te_graph_fixes.verify.child", *CASES, TE_GRAPH_FIXES=setting)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["case"]: line for line in lines}


@pytest.mark.parametrize("case", CASES)
def test_parameters_get_the_gradients_of_eager(case: str) -> None:
    found = run("on")[case]
    assert found.get("error") == 0.0, found


@pytest.mark.parametrize("case", CASES)
def test_without_the_fix_they_do_not(case: str) -> None:
    if not FIXES[case] & NEEDED:
        pytest.skip("this TE has the corrected code")
    found = run("off")[case]
    assert found["outcome"] == "measured", found
    assert found["error"] > 0.5
