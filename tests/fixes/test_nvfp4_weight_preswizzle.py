"""``nvfp4-weight-preswizzle``: cached weights cross between eager calls and graphs on a simulated RTX Blackwell."""

from __future__ import annotations

import pytest

from tests.support.child import simulate
from tests.support.published import TE

pytestmark = pytest.mark.te

PROGRAM = """
import te_graph_fixes, torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import NVFP4BlockScaling

H, BF16 = 128, torch.bfloat16
recipe = NVFP4BlockScaling(disable_stochastic_rounding=True)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        kinds = te.Linear, te.LayerNormLinear, te.LayerNormMLP
        self.layers = torch.nn.ModuleList(kind(H, H, params_dtype=BF16) for kind in kinds)
        self.experts = te.GroupedLinear(2, H, H, params_dtype=BF16)

    def forward(self, x, is_first_microbatch=None):
        for layer in self.layers:
            x = layer(x, is_first_microbatch=is_first_microbatch)
        return self.experts(x, [H // 2] * 2, is_first_microbatch=is_first_microbatch)


def sample():
    return torch.randn(H, H, dtype=BF16, device="cuda", requires_grad=True)


def train(graphed):
    torch.manual_seed(1)
    block, seen = Block(), []
    optimizer = torch.optim.SGD(block.parameters(), 0.1)

    def call(function, first):
        with te.autocast(enabled=True, recipe=recipe):
            out = function(sample(), is_first_microbatch=first)
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
        samples = [(sample(),), (sample(),)]
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


eager, graphed = train(False), train(True)
print(len(eager), [index for index, pair in enumerate(zip(eager, graphed)) if not torch.equal(*pair)])
"""
BEFORE = {"nothing": "", "a step": "step(block, block)", "an evaluation": "evaluate(True)"}
"""What runs eagerly before the capture."""


@pytest.mark.parametrize("before", BEFORE)
def test_cached_weights_cross(tried_te: TE, before: str) -> None:
    tried_te.require("nvfp4-weight-preswizzle")
    program = PROGRAM.replace("before()", BEFORE[before])
    found = simulate("-c", program, path=tried_te.path, TE_SIMULATOR_GPU="blackwell-rtx")
    assert found.splitlines()[-1].endswith(" []")
