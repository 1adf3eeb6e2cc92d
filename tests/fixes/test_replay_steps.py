"""Replays that are refused on the simulator: for their recipe, before a mark is set, and after a reset."""

from __future__ import annotations

import json

import pytest

from tests.support.child import run_program

pytestmark = pytest.mark.te

PROGRAM = """
def refusal(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)

layer = linear(fuse_wgrad_accumulation=True)
layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
layer.weight.grad_added_to_main_grad = False
run = te.make_graphed_callables(layer, (random(),))
"""


def output(program: str) -> object:
    return json.loads(run_program(PROGRAM + program, TE_GRAPH_FIXES="on").splitlines()[-1])


def test_a_refused_backward_leaves_no_mark() -> None:
    found = output("""
first, second = run(random()), run(random())
layer.weight.grad_added_to_main_grad = False
error = refusal(first.sum().backward)
print(json.dumps([error, layer.weight.grad_added_to_main_grad, layer.weight.main_grad.any().item()]))
""")
    assert isinstance(found, list)
    assert "the backward of callable 0 (Linear) cannot be replayed" in found[0]
    assert found[1:] == [False, False]


def test_a_graph_is_refused_after_its_reset() -> None:
    found = output("""
late = run(random())
run.reset()
print(json.dumps([refusal(late.sum().backward), refusal(lambda: run(random()))]))
""")
    assert isinstance(found, list)
    assert all(text and "reset" in text for text in found)


OTHER_RECIPE = """
layers = [linear() for _ in range(2)]
layer = torch.nn.Sequential(*layers)
autocast = getattr(te, "autocast", None) or te.fp8_autocast
delayed, current = DelayedScaling(amax_history_len=2), Float8CurrentScaling()
run = te.make_graphed_callables(layer, (random(),), enabled=True, recipe=delayed)
for _ in range(3):
    with autocast(enabled=True, recipe=delayed):
        loss = run(random()).sum()
    loss.backward()

def state():
    return [
        (key, value.tolist())
        for each in layers
        for key in ("scaling_fwd", "scaling_bwd")
        for value in (each.fp8_meta[key].scale, each.fp8_meta[key].amax_history)
    ]

before = state()
try:
    with autocast(enabled=True, recipe=current):
        run(random())
    error = ""
except RuntimeError as found:
    error = str(found)
print(json.dumps([error, hasattr(layers[0].fp8_meta["scaling_fwd"], "scale") and before == state()]))
"""


def test_a_replay_refused_for_its_recipe_keeps_the_scales() -> None:
    error, is_kept = json.loads(run_program(OTHER_RECIPE, TE_GRAPH_FIXES="on").splitlines()[-1])
    assert "Replay it in an autocast with the recipe of the capture" in error
    assert is_kept
