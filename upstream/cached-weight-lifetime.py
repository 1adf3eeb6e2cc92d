"""Eager training must not free the cached FP8 weights of a graph for inference."""

import pytest
import torch
from transformer_engine.common import recipe
from transformer_engine.pytorch import Linear, autocast, is_fp8_available, make_graphed_callables

fp8_available = is_fp8_available()


@pytest.mark.skipif(not fp8_available, reason="FP8 is not supported")
def test_make_graphed_callables_keeps_cached_weights_after_eager_training() -> None:
    """A graph for inference must use the weights that the last training forward quantized.

    Inference caches a quantized weight without a transpose. Training needs a transpose, so it
    replaces the cached weight. The graph must not read the memory of the replaced weight.
    """
    fp8_recipe = recipe.Float8CurrentScaling()
    module = Linear(256, 256, bias=False, params_dtype=torch.bfloat16, device="cuda")
    inp = torch.randn(256, 256, dtype=torch.bfloat16, device="cuda")
    eager = module.forward
    module.eval()
    with torch.no_grad():
        make_graphed_callables(
            module, (inp.clone(),), enabled=True, recipe=fp8_recipe, cache_quantized_params=True
        )
    graphed, module.forward = module.forward, eager

    def infer(forward, is_first_microbatch: bool) -> torch.Tensor:
        module.eval()
        with torch.no_grad(), autocast(enabled=True, recipe=fp8_recipe):
            return forward(inp, is_first_microbatch=is_first_microbatch).clone()

    assert torch.equal(infer(graphed, True), infer(eager, True))
    for _ in range(2):
        with torch.no_grad():
            module.weight.copy_(torch.randn_like(module.weight))
        module.train()
        with autocast(enabled=True, recipe=fp8_recipe):
            out = eager(inp.clone().requires_grad_(), is_first_microbatch=True)
        out.backward(inp)
        # If the memory of the replaced weight was freed, overwrite it.
        _ = [torch.full((256, 256), 0x7F, dtype=torch.uint8, device="cuda") for _ in range(64)]
        assert torch.equal(infer(graphed, False), infer(eager, False))
