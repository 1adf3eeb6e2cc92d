"""Test on the simulator that a capture restores each ``main_grad``, but keeps changes by the user's hooks."""

from __future__ import annotations

import json

import pytest

from tests.support import published
from tests.support.child import run_program

pytestmark = pytest.mark.te

PROGRAM = """
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
        layer = linear(64, bias=False, fuse_wgrad_accumulation=True)
        layer.weight.main_grad = buffer.fill_(7)
        layer.weight.grad_added_to_main_grad = False
        x = random(64, 64)
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
"""The value of ``main_grad`` after a capture, by the action of the hook. Other actions leave 0."""


LAYOUTS = """
def fused(features=32):
    options = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda"}
    return te.Linear(32, features, fuse_wgrad_accumulation=True, **options)

def mixed(first, second, layers):
    flat = torch.zeros(1 + 2 * 1024, dtype=torch.bfloat16, device="cuda")
    first.weight.main_grad, second.weight.main_grad = flat[1:].view(64, 32), torch.zeros(32, 32, device="cuda")
    return [flat]

def shared(first, second, layers):
    buffer = torch.zeros(64, 32, device="cuda")
    first.weight.main_grad, second.weight.main_grad = buffer, buffer[:32]
    return [buffer]

def unused(make):
    # A fused wgrad needs a contiguous main_grad, but the main_grad of an unused parameter may have any layout.
    def layout(first, second, layers):
        first.weight.main_grad = torch.zeros(64, 32, device="cuda")
        second.weight.main_grad = torch.zeros(32, 32, dtype=torch.bfloat16, device="cuda")
        layers.unused = torch.nn.Parameter(torch.zeros(1, device="cuda"))
        layers.unused.main_grad = make()
        return [layers.unused.main_grad]
    return layout

broadcast = unused(lambda: torch.ones((), device="cuda").expand(64, 64))
columns = unused(lambda: torch.ones(64, 128, device="cuda")[:, ::2])
empty = unused(lambda: torch.ones(0, dtype=torch.float16, device="cuda"))

def property_of_class(first, second, layers):
    class Weight(torch.nn.Parameter):
        main_grad = property(lambda self: self.kept[-1], lambda self, value: self.kept.append(value))

    buffer = torch.zeros(64, 32, device="cuda")
    first.weight = Weight(first.weight.data)
    first.weight.kept = [buffer]
    second.weight.main_grad = torch.zeros(32, 32, device="cuda")
    return [buffer]

def run(graph, layout):
    torch.manual_seed(1)
    first, second = fused(64), fused()
    layers = torch.nn.Sequential(first, torch.nn.Unflatten(1, (2, 32)), torch.nn.Flatten(0, 1), second)
    tensors = [*layout(first, second, layers), first.weight.main_grad, second.weight.main_grad]
    for value, tensor in enumerate(tensors[-2:], 1):
        tensor.fill_(value)
    x = random()
    step = te.make_graphed_callables(layers, (x.detach().clone().requires_grad_(),), **OPTIONS) if graph else layers
    assert all(a is b for a, b in zip(tensors[-2:], (first.weight.main_grad, second.weight.main_grad)))
    before = [tensor.clone() for tensor in tensors]
    step(x).sum().backward()
    return [*before, *tensors, x.grad]

OPTIONS = {"allow_unused_input": True}
for layout in (mixed, shared, broadcast, columns, empty, property_of_class):
    compare(run, layout)
"""


def test_main_grads_of_any_layout_are_restored() -> None:
    run_program(LAYOUTS)


@pytest.mark.skipif(published.te("installed").minor < 14, reason="TE before 2.14 has no warmup hooks")
def test_main_grad_is_as_the_hooks_leave_it() -> None:
    found = json.loads(run_program(PROGRAM, TE_GRAPH_FIXES="on").splitlines()[-1])
    assert len(found) in (14, 21)
    wrong = {}
    for name, (captured, is_wgrad_correct) in found.items():
        expected = LEFT.get(name.partition(",")[0], 0)
        if captured != [expected, expected] or not is_wgrad_correct:
            wrong[name] = captured
    assert not wrong
