"""``cached-weight-lifetime`` and ``state-after-evaluation`` on the simulator: a graph owns what it reads."""

from __future__ import annotations

import pytest

from tests.support import published
from tests.support.child import simulate

pytestmark = pytest.mark.te

FIXES = {"cached-weight-lifetime", "state-after-evaluation"}
REQUIRED = {"fp8-state-at-replay", "nested-autocast"}

OWNERS = """
import gc, weakref, te_graph_fixes, torch
import transformer_engine.pytorch as te
from tests.verify.driver.events import Training
from tests.verify.driver.program import Program
from tests.verify.driver.setting import use

options = {"inference": "first", "not_captured": (0,), "events": ("infer",)}
use(Program(recipe="delayed", other="current", weights="cached", **options))
training = Training(graphed=True)
(module,) = training.layers
weight = module._fp8_workspaces["weight"]
states = [module.fp8_meta[name] for name in ("scaling_fwd", "scaling_bwd")]
held = [weight._data, weight._scale_inv, *(state.scale for state in states), *(state.amax_history for state in states)]
held = [weakref.ref(tensor) for tensor in held]
training.event = "an evaluation"
training.evaluation("current")
del weight, states
te.quantization.FP8GlobalStateManager.reset()  # forgets the scales that it updated
gc.collect()
print([reference() is not None for reference in held])
"""


def test_a_graph_owns_what_it_reads() -> None:
    assert simulate("-c", OWNERS, TE_GRAPH_FIXES=",".join(FIXES | REQUIRED)).splitlines()[-1] == str([True] * 6)
    if published.te("installed").needed >= FIXES:
        assert simulate("-c", OWNERS, TE_GRAPH_FIXES="off").splitlines()[-1] == str([False] * 6)


NEW_WEIGHTS = """
import te_graph_fixes, torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling


def sample():
    return torch.randn(32, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)


def train(graphed, recipe):
    torch.manual_seed(1)
    linear, seen = te.Linear(64, 64, params_dtype=torch.bfloat16), []
    optimizer = torch.optim.SGD(linear.parameters(), 0.1)

    def eager(x, is_first_microbatch):
        if is_first_microbatch:
            linear._fp8_workspaces.clear()
        return linear(x, is_first_microbatch=is_first_microbatch)

    def step(*calls):
        for call, first in zip(calls, (True, False)):
            x = sample()
            with te.autocast(enabled=True, recipe=recipe):
                out = call(x, is_first_microbatch=first)
            out.float().pow(2).mean().backward()
            seen.extend([out.detach().clone(), x.grad.clone()])
        seen.extend(parameter.grad.clone() for parameter in linear.parameters())
        optimizer.step()
        optimizer.zero_grad()

    step(eager, eager)
    first = second = linear
    if graphed:
        options = {"_order": [1, 1, -1, -1], "_num_layers_per_chunk": [1], "cache_quantized_params": True}
        samples = [(sample(),), (sample(),)]
        first, second = te.make_graphed_callables((linear,), samples, enabled=True, recipe=recipe, **options)
    torch.manual_seed(2)
    for calls in ((first, second), (eager, second), (first, eager), (eager, eager), (first, second)):
        step(*calls)
    return seen


for recipe in (DelayedScaling(amax_history_len=3), Float8CurrentScaling(), Float8BlockScaling()):
    print(all(map(torch.equal, train(False, recipe), train(True, recipe))))
"""


def test_a_graph_uses_weights_that_eager_calls_create_anew() -> None:
    """A compiled `te.Linear` (TE #3505) creates a cached weight for each first microbatch."""
    assert simulate("-c", NEW_WEIGHTS, TE_GRAPH_FIXES="on").splitlines()[-3:] == ["True"] * 3
