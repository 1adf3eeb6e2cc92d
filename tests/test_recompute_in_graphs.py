"""``recompute-in-graphs`` on the simulator."""

from __future__ import annotations

import json
from typing import Any

import pytest

from te_graph_fixes.source import Source
from tests.child import simulate

FIX = "recompute-in-graphs"
CASES = ("recompute-behind-another", "recompute-in-an-autocast", "recompute-after-another")

pytestmark = pytest.mark.skipif(
    "_none_grad_context_wrapper" not in Source.installed().module("transformer_engine.pytorch.graph").text,
    reason="TE before 2.12 refuses to capture te.checkpoint",
)


def measure(setting: str) -> list[dict[str, Any]]:
    output = simulate("-m", "te_graph_fixes.verify.child", *CASES, TE_GRAPH_FIXES=setting)
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.parametrize("setting", [FIX, "on"])
def test_replays_update_scales_as_recomputations_do(setting: str) -> None:
    assert [line["error"] for line in measure(setting)] == [0.0, 0.0, 0.0]


def test_without_the_fix_scales_stay_as_they_were() -> None:
    *lines, after_another = measure("off")
    for line in lines:
        assert min(line["measures"]["errors"]["FP8 state"]) > 0
        assert max(line["measures"]["errors"]["wgrads"]) > 0.1
    assert max(after_another["measures"]["errors"]["wgrads"]) > 0.01
