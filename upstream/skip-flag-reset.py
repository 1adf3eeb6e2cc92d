"""Graphs must still quantize their weights after FP8GlobalStateManager.reset()."""

import pytest
import torch
from transformer_engine.common import recipe
from transformer_engine.pytorch import Linear, autocast, is_fp8_available, make_graphed_callables
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

fp8_available = is_fp8_available()


@pytest.mark.skipif(not fp8_available, reason="FP8 is not supported")
def test_make_graphed_callables_quantizes_after_reset() -> None:
    """After FP8GlobalStateManager.reset(), a first microbatch must quantize the weights again."""
    fp8_recipe = recipe.Float8CurrentScaling()
    module = Linear(128, 128, bias=False, params_dtype=torch.bfloat16, device="cuda")
    inp = torch.randn(128, 128, dtype=torch.bfloat16, device="cuda")
    make_graphed_callables(
        module, (inp.clone(),), enabled=True, recipe=fp8_recipe, cache_quantized_params=True
    )
    with torch.no_grad(), autocast(enabled=True, recipe=fp8_recipe):
        before = module(inp, is_first_microbatch=True).clone()
        module(inp, is_first_microbatch=False)
        FP8GlobalStateManager.reset()
        occupied = [torch.ones(1, device="cuda") for _ in range(64)]  # reuses a freed flag's memory
        module.weight.neg_()
    with torch.no_grad(), autocast(enabled=True, recipe=fp8_recipe):
        after = module(inp, is_first_microbatch=True)
    assert torch.equal(after, -before)
    assert all(tensor.item() == 1 for tensor in occupied)
