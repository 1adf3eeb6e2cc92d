"""A module and modules inside it, captured in one call, each with its own ``enabled``; on the simulator."""

from __future__ import annotations

import pytest

from te_graph_fixes.patching.source import Source
from tests.support.child import run_program

pytestmark = pytest.mark.te

PROGRAM = """
def random():
    return torch.randn(16, 32, dtype=torch.bfloat16, device="cuda", requires_grad=True)

class Block(torch.nn.Module):
    def __init__(self, *layers, checkpointed=False):
        super().__init__()
        self.layers, self.checkpointed = torch.nn.ModuleList(layers), checkpointed

    def forward(self, x):
        for layer in self.layers:
            x = te.checkpoint(layer, x) if self.checkpointed else layer(x)
        return x

class Own(Block):
    def forward(self, x):
        with te.autocast(enabled=False):
            return super().forward(x)

def train(graphed, kind, enabled, recipe):
    torch.manual_seed(1)
    first, second = (te.LayerNormLinear(32, 32, params_dtype=torch.bfloat16, device="cuda") for _ in range(2))
    inner = Own(second) if kind == "own" else Block(second, checkpointed=kind == "checkpoint")
    modules = (first, inner, Block(first, inner))
    if graphed:
        te.make_graphed_callables(modules, tuple((random(),) for _ in modules), enabled=enabled, recipe=recipe)
    torch.manual_seed(2)
    found = []
    for step in range(3):
        for module, enable in zip(modules[::-1], enabled[::-1]):
            x = random()
            with te.autocast(enabled=enable, recipe=recipe):
                out = module(x)
            out.float().pow(2).mean().backward()
            found += [out.detach().clone(), x.grad, *(p.grad.clone() for p in module.parameters())]
            module.zero_grad()
    return found

kind, recipe = KIND, RECIPE
for enabled in itertools.product((True, False), repeat=3):
    compare(train, kind, enabled, recipe)

layer = linear()
try:
    te.make_graphed_callables((layer, layer), ((random(),), (random(),)), enabled=(True, False))
except ValueError as error:
    assert "one module twice" in str(error)
else:
    raise AssertionError
"""


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("plain", "Float8CurrentScaling()"),
        ("plain", "DelayedScaling(amax_history_len=4)"),
        ("own", "DelayedScaling(amax_history_len=4)"),
        ("checkpoint", "Float8CurrentScaling()"),
        ("checkpoint", "DelayedScaling(amax_history_len=4)"),
    ],
)
def test_a_module_in_a_captured_module_runs_in_the_autocast_of_its_caller(kind: str, recipe: str) -> None:
    graph = Source.installed().module("transformer_engine.pytorch.graph").text
    if kind == "checkpoint" and "torch.autograd.grad(" in graph:
        pytest.skip("this TransformerEngine cannot capture a te.checkpoint")
    run_program(PROGRAM.replace("KIND", repr(kind)).replace("RECIPE", recipe))
