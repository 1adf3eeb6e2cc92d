"""Cached NVFP4 weights must not be swizzled again in each graph."""

import pytest
import torch
from transformer_engine.common import recipe
from transformer_engine.pytorch import Linear, autocast, is_nvfp4_available, make_graphed_callables

nvfp4_available = is_nvfp4_available()


@pytest.mark.skipif(not nvfp4_available, reason="NVFP4 is not supported")
def test_make_graphed_callables_nvfp4_weight_caching() -> None:
    """With a graph for each microbatch, outputs must be the same as in eager training."""
    fp4_recipe = recipe.NVFP4BlockScaling()
    torch.manual_seed(1)
    module = Linear(128, 128, bias=False, params_dtype=torch.bfloat16, device="cuda")
    batches = torch.randn(3, 128, 128, dtype=torch.bfloat16, device="cuda")

    def forward(runs) -> list:
        outputs = []
        for number, (run, batch) in enumerate(zip(runs, batches)):
            with autocast(enabled=True, recipe=fp4_recipe):
                out = run(batch.clone().requires_grad_(), is_first_microbatch=number == 0)
            outputs.append(out.detach().clone())
        return outputs

    expected = forward([module] * 3)
    graphs = make_graphed_callables(
        (module,),
        [(batch.clone().requires_grad_(),) for batch in batches],
        _order=[1, 1, 1, -1, -1, -1],
        _num_layers_per_chunk=[1],
        enabled=True,
        recipe=fp4_recipe,
        cache_quantized_params=True,
    )
    assert all(map(torch.equal, forward(graphs), expected))
