"""A graph without a backward must not prevent the amax reduction of other backwards."""

import pytest
import torch
from transformer_engine.common import recipe
from transformer_engine.pytorch import Linear, autocast, is_fp8_available, make_graphed_callables

fp8_available = is_fp8_available()


@pytest.mark.skipif(not fp8_available, reason="FP8 is not supported")
def test_make_graphed_callables_reduces_backward_amaxes_behind_frozen_graph() -> None:
    """After a frozen graph, another module's backward must update scales as in eager training."""
    fp8_recipe = recipe.DelayedScaling()
    scales = []
    for graphed in (False, True):
        torch.manual_seed(1)
        frozen, trained = (
            Linear(128, 128, params_dtype=torch.bfloat16, device="cuda") for _ in range(2)
        )
        frozen.requires_grad_(False)
        if graphed:
            sample = torch.randn(128, 128, dtype=torch.bfloat16, device="cuda")
            make_graphed_callables(frozen.eval(), (sample,), enabled=True, recipe=fp8_recipe)
        torch.manual_seed(2)
        for _ in range(3):
            inp = torch.randn(128, 128, dtype=torch.bfloat16, device="cuda")
            with autocast(enabled=True, recipe=fp8_recipe):
                out = trained(frozen(inp))
            out.backward(torch.randn_like(out) / 1000)
        scales.append(trained.fp8_meta["scaling_bwd"].scale.clone())
    assert torch.equal(*scales)
