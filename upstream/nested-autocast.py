"""Modules inside a captured module must run in FP8."""

import pytest
import torch
from transformer_engine.common import recipe
from transformer_engine.pytorch import Linear, autocast, is_fp8_available, make_graphed_callables

fp8_available = is_fp8_available()


@pytest.mark.skipif(not fp8_available, reason="FP8 is not supported")
def test_make_graphed_callables_nested_module_of_captured_class() -> None:
    """A module must run in FP8 if a captured module of the same class contains it."""
    fp8_recipe = recipe.Float8CurrentScaling()
    outputs = []
    for graphed in (False, True):
        torch.manual_seed(1)
        inner, outer = (
            Linear(128, 128, params_dtype=torch.bfloat16, device="cuda") for _ in range(2)
        )
        model = torch.nn.Sequential(torch.nn.Sequential(inner), outer)
        inp = torch.randn(128, 128, dtype=torch.bfloat16, device="cuda")
        if graphed:
            sample = torch.randn_like(inp).requires_grad_()
            make_graphed_callables(model, (sample,), enabled=True, recipe=fp8_recipe)
        with autocast(enabled=True, recipe=fp8_recipe):
            outputs.append(model(inp.clone().requires_grad_()).detach().clone())
    assert torch.equal(*outputs)
