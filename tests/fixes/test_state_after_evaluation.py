"""``state-after-evaluation`` on the simulator: a graph owns the scales that its forward used in the capture."""

from __future__ import annotations

import pytest

from tests.support.child import simulate

pytestmark = pytest.mark.te

RECIPES = """
import torch
import te_graph_fixes
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

def recipe():
    return DelayedScaling(amax_history_len=4)

def sample():
    return torch.randn(16, 32, dtype=torch.bfloat16, device="cuda", requires_grad=True)

class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.branch = (te.Linear(32, 32, params_dtype=torch.bfloat16, device="cuda") for _ in range(2))
        self.takes_branch = True

    def forward(self, x):
        if self.takes_branch:
            x = self.branch(x)
        x = self.inner(x)
        with te.autocast(enabled=False):
            return self.inner(x)

def train(graph, evaluates, takes_branch):
    torch.manual_seed(1)
    layer, shared = Tied(), recipe()
    with te.autocast(enabled=True, recipe=shared):
        layer(sample()).sum().backward()
    layer.zero_grad()
    layer.takes_branch = takes_branch
    run = te.make_graphed_callables(layer, (sample(),), enabled=True, recipe=shared) if graph else layer
    torch.manual_seed(2)
    for _ in range(3):
        x = sample()
        with te.autocast(enabled=True, recipe=recipe()):
            y = run(x)
        (y.float() ** 2).mean().backward()
        grads = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
        yield from (y, x.grad, *grads)
        for module in (layer.inner, layer.branch):
            state = module.fp8_meta["scaling_fwd"]
            if hasattr(state, "scale"):
                yield from (state.scale, state.amax_history)
        layer.zero_grad()
        if evaluates:
            layer.eval()
            with torch.no_grad(), te.autocast(enabled=True, recipe=Float8CurrentScaling()):
                yield layer(x)
            layer.train()

for case in ((False, True), (True, True), (True, False)):
    eager, graph = ([t.detach().clone().float() for t in train(graphed, *case)] for graphed in (False, True))
    print([bool((a == b).all()) for a, b in zip(eager, graph, strict=True)].count(False))
"""

NEW_OBJECTS = """
import torch
import te_graph_fixes
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

calls = []
init = TransformerEngineBaseModule.init_fp8_metadata
TransformerEngineBaseModule.init_fp8_metadata = lambda *args, **options: (calls.append(1), init(*args, **options))[1]
layer = torch.nn.Sequential(*(te.Linear(32, 32, params_dtype=torch.bfloat16, device="cuda") for _ in range(3)))
x = torch.randn(16, 32, dtype=torch.bfloat16, device="cuda", requires_grad=True)
te.make_graphed_callables(layer, (x,), enabled=True, recipe=DelayedScaling())
del calls[:]
for _ in range(3):
    with te.autocast(enabled=True, recipe=DelayedScaling()):
        layer(x).sum().backward()
print(len(calls))
"""


def test_a_graph_resumes_the_states_that_its_forward_used() -> None:
    """The layer also runs in bf16, other modules run only eagerly, and each step has a recipe object of its own."""
    assert simulate("-c", RECIPES, TE_GRAPH_FIXES="on").splitlines()[-3:] == ["0"] * 3


def test_an_equal_recipe_object_initializes_no_module() -> None:
    assert simulate("-c", NEW_OBJECTS, TE_GRAPH_FIXES="on").splitlines()[-1] == "0"
