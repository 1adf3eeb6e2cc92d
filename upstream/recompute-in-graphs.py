"""Activation recomputation in a graph must update scales as eager training does."""

from contextlib import nullcontext

import pytest
import torch
from transformer_engine.common import recipe
from transformer_engine.pytorch import (
    Linear,
    autocast,
    checkpoint,
    is_fp8_available,
    make_graphed_callables,
)

fp8_available = is_fp8_available()


class _Recomputed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = Linear(128, 128, bias=False, params_dtype=torch.bfloat16, device="cuda")

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.linear, inp)


@pytest.mark.skipif(not fp8_available, reason="FP8 is not supported")
@pytest.mark.parametrize("nested", (False, True))
def test_make_graphed_callables_recomputation_updates_scales(nested: bool) -> None:
    """A graph must update scales after a module without a backward, and in a nested autocast."""
    fp8_recipe = recipe.DelayedScaling()
    states = []
    for graphed in (False, True):
        torch.manual_seed(1)
        other, module = _Recomputed(), _Recomputed()
        if graphed:
            sample = torch.randn(128, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            make_graphed_callables(module, (sample,), enabled=True, recipe=fp8_recipe)
        torch.manual_seed(2)
        for _ in range(2):
            inp = torch.randn(128, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            outer = autocast(enabled=False) if nested else nullcontext()
            with outer, autocast(enabled=True, recipe=fp8_recipe):
                if not nested:
                    other.linear(inp.detach())
                out = module(inp)
            out.backward(torch.ones_like(out))
        for key in ("scaling_fwd", "scaling_bwd"):
            state = module.linear.fp8_meta[key]
            states += [state.scale.clone(), state.amax_history.clone()]
    assert all(map(torch.equal, states[4:], states[:4]))
