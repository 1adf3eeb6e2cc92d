"""The steps of a replay on the simulator: a refused replay leaves no trace, and a graph is refused after its reset."""

from __future__ import annotations

import json

import pytest

from tests.support.child import simulate

pytestmark = pytest.mark.te

PROGRAM = """
import json, te_graph_fixes, torch, transformer_engine.pytorch as te
from transformer_engine.pytorch import _te_replay

refused = None
add = _te_replay.Replay.add

def add_refusable(replay, phase, name, step):
    def check(*arguments):
        if refused == (phase, name):
            raise RuntimeError("refused")
        return step(*arguments)
    checks.add((phase, name)) if phase.endswith("check") else None
    add(replay, phase, name, check if phase.endswith("check") else step)

checks = set()
_te_replay.Replay.add = add_refusable

def sample():
    return torch.randn(16, 32, dtype=torch.bfloat16, device="cuda").requires_grad_()

def refusal(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)

layer = te.Linear(32, 32, device="cuda", fuse_wgrad_accumulation=True, params_dtype=torch.bfloat16)
layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
layer.weight.grad_added_to_main_grad = False
run = te.make_graphed_callables(layer, (sample(),))
"""


def output(program: str) -> object:
    return json.loads(simulate("-c", PROGRAM + program, TE_GRAPH_FIXES="on").splitlines()[-1])


def test_a_refused_backward_leaves_no_mark() -> None:
    found = output("""
first, second = run(sample()), run(sample())
layer.weight.grad_added_to_main_grad = False
error = refusal(first.sum().backward)
print(json.dumps([error, layer.weight.grad_added_to_main_grad, layer.weight.main_grad.any().item()]))
""")
    assert isinstance(found, list)
    assert "the backward of callable 0 (Linear) cannot be replayed" in found[0]
    assert found[1:] == [False, False]


def test_a_graph_is_refused_after_its_reset() -> None:
    found = output("""
late = run(sample())
run.reset()
print(json.dumps([refusal(late.sum().backward), refusal(lambda: run(sample()))]))
""")
    assert isinstance(found, list)
    assert all(text and "reset" in text for text in found)
