"""The backward of GroupedLinear must not reduce amaxes in a capture."""

import pytest
import torch
from transformer_engine.common import recipe
from transformer_engine.pytorch import (
    GroupedLinear,
    autocast,
    is_fp8_available,
    make_graphed_callables,
)

fp8_available = is_fp8_available()


class _Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = GroupedLinear(
            2, 128, 128, bias=False, params_dtype=torch.bfloat16, device="cuda"
        )

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        return self.experts(inp, [64, 64])


@pytest.mark.skipif(not fp8_available, reason="FP8 is not supported")
def test_make_graphed_callables_grouped_linear_amax_reduction() -> None:
    """A capture after eager steps must not record updates of the scales.

    In eager training, no gradient reaches the first module of the autocast, so no backward
    updates scales.
    """
    fp8_recipe = recipe.DelayedScaling(amax_history_len=4)
    scales = []
    for graphed in (False, True):
        torch.manual_seed(1)
        first, second = _Experts(), _Experts()

        def step(count: int) -> None:
            for _ in range(count):
                inp = torch.randn(128, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
                with autocast(enabled=True, recipe=fp8_recipe):
                    out = second(first(inp).detach().requires_grad_())
                out.backward(torch.randn_like(out))

        torch.manual_seed(2)
        step(2)
        state = torch.cuda.get_rng_state()
        if graphed:
            sample = torch.randn(128, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            make_graphed_callables(second, (sample,), enabled=True, recipe=fp8_recipe)
        torch.cuda.set_rng_state(state)
        step(3)
        scales.append(second.experts.fp8_meta["scaling_bwd"].scale.clone())
    assert torch.equal(*scales)
