"""A graph without cached weights must quantize its weights after an update."""

import pytest
import torch
from transformer_engine.common import recipe
from transformer_engine.pytorch import Linear, autocast, is_fp8_available, make_graphed_callables

fp8_available = is_fp8_available()


class _Marked(torch.nn.Module):
    """A module with ``is_first_microbatch``, like the modules of Megatron-Core."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Linear(128, 128, bias=False, params_dtype=torch.bfloat16, device="cuda")
        self.is_first_microbatch = True

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        out = self.linear(inp, is_first_microbatch=self.is_first_microbatch)
        self.is_first_microbatch = False
        return out


@pytest.mark.skipif(not fp8_available, reason="FP8 is not supported")
def test_make_graphed_callables_quantizes_weights_of_marked_modules() -> None:
    """If is_first_microbatch is set before each forward, outputs must be as in eager training."""
    fp8_recipe = recipe.Float8CurrentScaling()
    inp = torch.randn(128, 128, dtype=torch.bfloat16, device="cuda")
    outputs = []
    for graphed in (False, True):
        torch.manual_seed(1)
        module = _Marked()
        if graphed:
            sample = inp.clone().requires_grad_()
            make_graphed_callables(module, (sample,), enabled=True, recipe=fp8_recipe)
            module.is_first_microbatch = False  # TE up to 2.13 sets it to True after the warmup
        for _ in range(2):
            module.is_first_microbatch = True
            with autocast(enabled=True, recipe=fp8_recipe):
                outputs.append(module(inp.clone().requires_grad_()).detach().clone())
            with torch.no_grad():
                module.linear.weight.neg_()
    assert all(map(torch.equal, outputs[2:], outputs[:2]))
