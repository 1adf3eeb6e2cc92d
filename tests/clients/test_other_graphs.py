"""TE's modules in graphs that `make_graphed_callables` has not made: `tests/gpu/other_graphs.py` on the simulator.

Without this package they are right; with it they have to be right as well.
"""

from __future__ import annotations

import json
from typing import Any

from te_graph_fixes.decision import verdicts
from te_graph_fixes.patching.source import Source
from te_graph_fixes.state import State
from tests.support.child import simulate

PROGRAM = "tests/gpu/other_graphs.py"
AS_WITHOUT = (
    "step/Linear/fp8-delayed",
    "microbatches/LayerNormMLP/fp8-delayed/recompute",
)
CORRECTED = ["after-te-was-reset/Linear/fp8-current", "te-after-te-was-reset/Linear/fp8-current"]
"""Without this package TE's own graphs in them are wrong."""
if verdicts(Source.installed())["grouped-linear-skip-flag"].state == State.APPLICABLE:
    CORRECTED.append("after-te/GroupedLinear/fp8-delayed/alone")  # upstream's correction is wrong there


def measure(setting: str, *cases: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in simulate(PROGRAM, "--case", *cases, TE_GRAPH_FIXES=setting).splitlines()]


def test_other_graphs_are_as_without_the_package() -> None:
    found = measure("on", *AS_WITHOUT, *CORRECTED)
    assert [set(case["errors"].values()) for case in found] == [{0.0}] * len(found)
    assert len(found) == len(AS_WITHOUT) + len(CORRECTED)
    assert found[: len(AS_WITHOUT)] == measure("off", *AS_WITHOUT)


CAPTURE_OF_OTHERS = """
import gc, weakref, torch
import te_graph_fixes
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.graph import set_capture_end, set_capture_start
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

te_layer, layer = (te.Linear(64, 64, params_dtype=torch.bfloat16, device="cuda") for _ in range(2))
x = torch.ones(32, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
te.make_graphed_callables(te_layer, (x,), enabled=True, recipe=DelayedScaling())
set_capture_start()
graph = torch.cuda.CUDAGraph()
with te.autocast(enabled=True, recipe=DelayedScaling()):
    layer(x)
    with torch.cuda.graph(graph):
        layer(x)
set_capture_end()
scale = weakref.ref(layer.fp8_meta["scaling_fwd"].scale)
del layer, graph
FP8GlobalStateManager.reset()
gc.collect()
assert scale() is None, gc.get_referrers(scale())
"""


def test_what_others_capture_is_not_held() -> None:
    simulate("-c", CAPTURE_OF_OTHERS)
