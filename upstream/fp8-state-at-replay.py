"""Replays must update the scales that eager forwards update."""

import pytest
import torch
import transformer_engine.pytorch.ops as te_ops
from transformer_engine.common import recipe
from transformer_engine.pytorch import (
    Linear,
    autocast,
    checkpoint,
    is_fp8_available,
    make_graphed_callables,
)

fp8_available = is_fp8_available()


class _ForwardOfSubmodule(torch.nn.Module):
    """A module that calls ``forward`` of its submodule, so the submodule's hooks do not run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Linear(128, 128, params_dtype=torch.bfloat16, device="cuda")

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        return self.linear.forward(inp)


class _OwnAutocast(_ForwardOfSubmodule):
    """A module that enters an autocast with its own recipe."""

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        with autocast(enabled=True, recipe=recipe.DelayedScaling()):
            return self.linear(inp)


@pytest.mark.skipif(not fp8_available, reason="FP8 is not supported")
@pytest.mark.parametrize(
    "case", ("forward of submodule", "own autocast", "operation", "checkpoint")
)
def test_make_graphed_callables_updates_scales(case: str) -> None:
    """With inputs that grow at each step, gradients must be the same as in eager training."""
    fp8_recipe = recipe.DelayedScaling()
    if case == "own autocast":
        fp8_recipe = recipe.Float8CurrentScaling()
    grads = []
    for graphed in (False, True):
        torch.manual_seed(1)
        if case == "operation":
            module = te_ops.Linear(128, 128, dtype=torch.bfloat16, device="cuda")
        elif case == "checkpoint":
            module = Linear(128, 128, params_dtype=torch.bfloat16, device="cuda")
        else:
            module = {"own autocast": _OwnAutocast}.get(case, _ForwardOfSubmodule)()
        if graphed:
            sample = torch.randn(128, 128, dtype=torch.bfloat16, device="cuda").requires_grad_()
            make_graphed_callables(module, (sample,), enabled=True, recipe=fp8_recipe)
        torch.manual_seed(2)
        for step in range(3):
            inp = (torch.randn(128, 128, device="cuda") * 10**step).bfloat16().requires_grad_()
            with autocast(enabled=True, recipe=fp8_recipe):
                out = checkpoint(module, inp) if case == "checkpoint" else module(inp)
            out.backward(torch.randn_like(out) / 1000)
            grads.append([param.grad.clone() for param in module.parameters()])
            module.zero_grad()
    for expected, found in zip(grads[:3], grads[3:]):
        assert all(map(torch.equal, found, expected))
