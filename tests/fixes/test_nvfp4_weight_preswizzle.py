"""Test that eager calls and graphs use each other's cached NVFP4 weights on a simulated RTX Blackwell."""

from __future__ import annotations

import pytest

from tests.support.child import run_program
from tests.support.published import TE

pytestmark = pytest.mark.te

PROGRAM = """
from transformer_engine.common.recipe import NVFP4BlockScaling

H = 128
recipe = NVFP4BlockScaling(disable_stochastic_rounding=True)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        kinds = te.Linear, te.LayerNormLinear, te.LayerNormMLP
        self.layers = torch.nn.ModuleList(kind(H, H, params_dtype=torch.bfloat16) for kind in kinds)
        self.experts = te.GroupedLinear(2, H, H, params_dtype=torch.bfloat16)

    def forward(self, x, is_first_microbatch=None):
        for layer in self.layers:
            x = layer(x, is_first_microbatch=is_first_microbatch)
        return self.experts(x, [H // 2] * 2, is_first_microbatch=is_first_microbatch)

def train(graphed):
    torch.manual_seed(1)
    block, seen = Block(), []
    optimizer = torch.optim.SGD(block.parameters(), 0.1)

    def call(function, first):
        with te.autocast(enabled=True, recipe=recipe):
            out = function(random(H, H), is_first_microbatch=first)
        seen.append(out.detach().clone())
        return out

    def step(*functions):
        for number, function in enumerate(functions):
            call(function, number == 0).float().pow(2).mean().backward()
        seen.extend(parameter.grad.clone() for parameter in block.parameters())
        optimizer.step()
        optimizer.zero_grad()

    def evaluate(first):
        with torch.no_grad():
            call(block, first)

    before()
    first, second = block, block
    if graphed:
        state = torch.get_rng_state()
        samples = [(random(H, H),), (random(H, H),)]
        options = {"enabled": True, "recipe": recipe, "cache_quantized_params": True}
        order = {"_order": [1, 1, -1, -1], "_num_layers_per_chunk": [1]}
        first, second = te.make_graphed_callables((block,), samples, **order, **options)
        torch.set_rng_state(state)
    if seen:
        evaluate(False)  # with weights cached before the capture
    step(first, second)
    evaluate(False)
    step(first, block)  # an eager microbatch uses the weights of a graph
    step(block, second)  # a graph uses the weights of an eager microbatch
    evaluate(True)
    step(block, block)
    step(first, second)
    return seen

compare(train)
"""
BEFORE = {"nothing": "", "a step": "step(block, block)", "an evaluation": "evaluate(True)"}
"""The code that runs eagerly before the capture."""


@pytest.mark.parametrize("before", BEFORE)
def test_cached_weights_cross(tried_te: TE, before: str) -> None:
    tried_te.require("nvfp4-weight-preswizzle")
    program = PROGRAM.replace("before()", BEFORE[before])
    run_program(program, path=tried_te.path, TE_SIMULATOR_GPU="blackwell-rtx")
