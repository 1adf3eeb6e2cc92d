"""What parameters get: ``param-grad-lifetime``, ``fused-dummy-copies``, ``parameter-hooks``, ``warmup-main-grads``.

On the simulator; the cases are those of ``te-graph-fixes verify``.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.source import Source
from tests.child import on_simulator

NEEDED = {fix for fix in CATALOGUE if CATALOGUE[fix].verdict(Source.installed()).verdict == "applicable"}
FIXES = {
    "tied-weight": {"param-grad-lifetime"},
    "fused-mlps": {"param-grad-lifetime", "fused-dummy-copies"},
    "parameter-hooks": {"parameter-hooks"},
    "main-grads-at-capture": {"warmup-main-grads"},
}


@functools.cache
def run(setting: str) -> dict[str, Any]:
    """What the cases measure in a child process on the simulator."""
    done = on_simulator("-m", "te_graph_fixes.verify.child", *FIXES, TE_GRAPH_FIXES=setting)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["case"]: line for line in lines}


@pytest.mark.parametrize("case", FIXES)
def test_parameters_get_the_gradients_of_eager(case: str) -> None:
    found = run("on")[case]
    assert found.get("error") == 0.0, found


@pytest.mark.parametrize("case", FIXES)
def test_without_the_fix_they_do_not(case: str) -> None:
    if not FIXES[case] & NEEDED:
        pytest.skip("this TE has the corrected code")
    found = run("off")[case]
    assert found["outcome"] == "measured", found
    assert found["error"] > 0.5


def test_modules_in_training_are_captured_in_inference_mode() -> None:
    done = on_simulator(
        "-c",
        """
import te_graph_fixes, torch
import transformer_engine.pytorch as te
layer = te.Linear(32, 32, device="cuda")
with torch.inference_mode():
    sample, x = torch.randn(2, 32, 32, device="cuda")
    wanted = layer(x)
    graphed = te.make_graphed_callables(layer, (sample.requires_grad_(),), allow_unused_input=True)
    print(torch.equal(graphed(x), wanted))
""",
    )
    assert done.stdout == "True\n", done.stderr
