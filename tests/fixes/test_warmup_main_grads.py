"""``warmup-main-grads`` on the simulator: the effect of the user's warmup hooks on ``main_grad`` lasts."""

from __future__ import annotations

import json

import pytest

from tests.support import published
from tests.support.child import simulate

pytestmark = [
    pytest.mark.te,
    pytest.mark.skipif(published.te("installed").minor < 14, reason="TE before 2.14 has no warmup hooks"),
]

PROGRAM = """
import json, te_graph_fixes, torch, transformer_engine.pytorch as te

def fresh(value=0.0):
    return torch.full((64, 64), value, device="cuda")

buffer = fresh()

def change(weight, action):
    if action == "zero":
        weight.main_grad.zero_()
    elif action == "fill":
        weight.main_grad.fill_(3)
    elif action == "zero the buffer":
        buffer.zero_()
    elif action == "assign":
        weight.main_grad = fresh()
    elif action == "assign elsewhere":
        weight.main_grad = buffer.zero_()
    elif action == "delete and make":
        del weight.main_grad
        weight.main_grad = fresh(2.0)

found = {}
for action in ("nothing", "zero", "fill", "zero the buffer", "assign", "assign elsewhere", "delete and make"):
    for name in ("pre_warmup_hook", "post_warmup_hook", "capture_time_hooks"):
        layer = te.Linear(64, 64, bias=False, fuse_wgrad_accumulation=True, params_dtype=torch.bfloat16, device="cuda")
        layer.weight.main_grad = buffer.fill_(7)
        layer.weight.grad_added_to_main_grad = False
        x = torch.randn(64, 64, dtype=torch.bfloat16, device="cuda").requires_grad_()
        hook = lambda *_: change(layer.weight, action)
        given = [{"forward_pre_hooks": {0: hook}}] if name == "capture_time_hooks" else hook
        try:
            run = te.make_graphed_callables(layer, (x,), **{name: given})
        except TypeError:
            continue  # this TE lacks these hooks
        captured = float(layer.weight.main_grad.min()), float(layer.weight.main_grad.max())
        before = layer.weight.main_grad.clone()
        run(x.detach().requires_grad_()).sum().backward()
        wgrad = layer.weight.main_grad - before
        expected = torch.ones(64, 64, device="cuda") @ x.detach().float()
        found[f"{action}, {name}"] = captured, float((wgrad - expected).norm() / expected.norm()) < 1e-6
print(json.dumps(found))
"""
LEFT = {"nothing": 7, "fill": 3, "delete and make": 2}
"""The value of ``main_grad`` after a capture; 0 after the other actions."""


def test_main_grad_is_as_the_hooks_leave_it() -> None:
    found = json.loads(simulate("-c", PROGRAM, TE_GRAPH_FIXES="on").splitlines()[-1])
    assert len(found) in (14, 21)
    wrong = {}
    for name, (captured, is_wgrad_correct) in found.items():
        expected = LEFT.get(name.partition(",")[0], 0)
        if captured != [expected, expected] or not is_wgrad_correct:
            wrong[name] = captured
    assert not wrong
