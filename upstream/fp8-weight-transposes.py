"""A replay must use transposes of the current FP8 primary weights."""

from unittest import mock

import pytest
import torch
from transformer_engine.common import recipe
from transformer_engine.pytorch import (
    Linear,
    autocast,
    is_fp8_available,
    make_graphed_callables,
    quantized_model_init,
)
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.tensor.utils import cast_master_weights_to_fp8

fp8_available = is_fp8_available()


@pytest.mark.skipif(not fp8_available, reason="FP8 is not supported")
@pytest.mark.parametrize("built_with_grad", (False, True))
def test_make_graphed_callables_updates_weight_transposes(built_with_grad: bool) -> None:
    """Dgrads after an update of the weights must be the same as in eager training.

    ``cast_master_weights_to_fp8`` marks the transpose of a weight as invalid. If a module was
    built under ``no_grad``, each ``copy_`` into its weight frees the transpose.
    """
    fp8_recipe = recipe.DelayedScaling()
    dgrads = []
    for graphed in (False, True):
        FP8GlobalStateManager.reset()
        torch.manual_seed(1)
        with torch.set_grad_enabled(built_with_grad), quantized_model_init(recipe=fp8_recipe):
            module = Linear(256, 256, bias=False, params_dtype=torch.bfloat16, device="cuda")
        batches = torch.randn(3, 256, 256, dtype=torch.bfloat16, device="cuda")
        weights = torch.randn_like(batches)
        if graphed:
            sample = (torch.randn_like(batches[0]).requires_grad_(),)
            make_graphed_callables(module, sample, enabled=True, recipe=fp8_recipe)
        for batch, weight in zip(batches, weights):
            inp = batch.clone().requires_grad_()
            with autocast(enabled=True, recipe=fp8_recipe):
                out = module(inp)
            out.backward(batch)
            dgrads.append(inp.grad.clone())
            with torch.no_grad(), mock.patch("torch.distributed.all_reduce"):
                if built_with_grad:
                    master = weight.float().view(-1)
                    cast_master_weights_to_fp8([module.weight], [master], [0], None)
                else:
                    module.weight.copy_(weight)
    assert all(map(torch.equal, dgrads[3:], dgrads[:3]))
