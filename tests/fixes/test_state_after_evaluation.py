"""Test ``state-after-evaluation`` on the simulator: a graph owns the scales that its forward used in the capture."""

from __future__ import annotations

import pytest

from tests.support.child import run_program

pytestmark = pytest.mark.te

NEW_OBJECTS = """
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

calls = []
init = TransformerEngineBaseModule.init_fp8_metadata
TransformerEngineBaseModule.init_fp8_metadata = lambda *args, **options: (calls.append(1), init(*args, **options))[1]
layer = torch.nn.Sequential(*(linear() for _ in range(3)))
x = random()
te.make_graphed_callables(layer, (x,), enabled=True, recipe=DelayedScaling())
del calls[:]
for _ in range(3):
    with te.autocast(enabled=True, recipe=DelayedScaling()):
        layer(x).sum().backward()
print(len(calls))
"""

ATTENTION = """
from tests.support.snapshot import changes, snapshot

def inputs():
    return tuple(random(32, 2, 4, 16) for _ in range(3))

layer = te.DotProductAttention(4, 16, attention_dropout=0.0)
delayed, current = DelayedScaling(amax_history_len=4, fp8_dpa=True), Float8CurrentScaling(fp8_dpa=True)
run = te.make_graphed_callables(layer, inputs(), enabled=True, recipe=delayed)
with te.autocast(enabled=True, recipe=delayed):
    run(*inputs()).sum().backward()
with te.autocast(enabled=True, recipe=current):
    before = snapshot(layer, Manager)
    print(error_of(lambda: run(*inputs())))
    print(changes(before, snapshot(layer, Manager)))
"""
EMULATED = {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0", "NVTE_UnfusedDPA_Emulate_FP8": "1"}


def test_an_equal_recipe_object_initializes_no_module() -> None:
    assert run_program(NEW_OBJECTS, TE_GRAPH_FIXES="on").splitlines()[-1] == "0"


def test_attention_in_another_recipe_is_refused_before_its_state_changes() -> None:
    """In current scaling, attention has an amax history of 1 entry. In the capture, in delayed scaling, it had 4."""
    error, changed = run_program(ATTENTION, NVTE_MASKED_SOFTMAX_FUSION="0", **EMULATED).splitlines()[-2:]
    assert "captured with a DelayedScalingRecipeState of 4 entries" in error
    assert "replayed with a DelayedScalingRecipeState of 1 entries" in error
    assert changed == "[]"
