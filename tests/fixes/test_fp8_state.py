"""``cached-weight-lifetime`` and ``state-after-evaluation`` on the simulator: a graph owns what it reads."""

from __future__ import annotations

import pytest

from tests.support.child import run_program

pytestmark = pytest.mark.te

NEW_WEIGHTS = """
def train(graphed, recipe):
    torch.manual_seed(1)
    layer, seen = linear(), []
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def eager(x, is_first_microbatch):
        if is_first_microbatch:
            layer._fp8_workspaces.clear()
        return layer(x, is_first_microbatch=is_first_microbatch)

    def step(*calls):
        for call, first in zip(calls, (True, False)):
            x = random()
            with te.autocast(enabled=True, recipe=recipe):
                out = call(x, is_first_microbatch=first)
            out.float().pow(2).mean().backward()
            seen.extend([out.detach().clone(), x.grad.clone()])
        seen.extend(parameter.grad.clone() for parameter in layer.parameters())
        optimizer.step()
        optimizer.zero_grad()

    step(eager, eager)
    first = second = layer
    if graphed:
        options = {"_order": [1, 1, -1, -1], "_num_layers_per_chunk": [1], "cache_quantized_params": True}
        samples = [(random(),), (random(),)]
        first, second = te.make_graphed_callables((layer,), samples, enabled=True, recipe=recipe, **options)
    torch.manual_seed(2)
    for calls in ((first, second), (eager, second), (first, eager), (eager, eager), (first, second)):
        step(*calls)
    return seen

for recipe in (DelayedScaling(amax_history_len=3), Float8CurrentScaling(), Float8BlockScaling()):
    compare(train, recipe)
"""


def test_a_graph_uses_weights_that_eager_calls_create_anew() -> None:
    """A compiled `te.Linear` (TE #3505) creates a cached weight for each first microbatch."""
    run_program(NEW_WEIGHTS)
