"""An eager module must not run in the autocast of an earlier capture."""

import pytest
import torch
from transformer_engine.common import recipe
from transformer_engine.pytorch import Linear, autocast, is_fp8_available, make_graphed_callables

fp8_available = is_fp8_available()


class _Base(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = Linear(128, 128, bias=False, params_dtype=torch.bfloat16, device="cuda")

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        return self.linear(inp)


class _Derived(_Base):
    pass


@pytest.mark.skipif(not fp8_available, reason="FP8 is not supported")
def test_make_graphed_callables_restores_call_of_subclass() -> None:
    """After a capture of a class and its subclass, eager modules must run in FP8."""
    fp8_recipe = recipe.Float8CurrentScaling()
    inp = torch.randn(128, 128, dtype=torch.bfloat16, device="cuda")
    eager = _Derived()
    outputs = []
    for captured in (False, True):
        if captured:
            samples = tuple((inp.clone().requires_grad_(),) for _ in range(2))
            make_graphed_callables((_Base(), _Derived()), samples, enabled=True, recipe=fp8_recipe)
        with autocast(enabled=True, recipe=fp8_recipe):
            outputs.append(eager(inp).detach().clone())
    assert torch.equal(*outputs)
