"""The gradients of leaves that are passed as inputs must not alias graph memory."""

import torch
from transformer_engine.pytorch import make_graphed_callables


class _Scale(torch.nn.Module):
    def forward(self, inp: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return inp * scale


def test_make_graphed_callables_accumulates_grads_of_input_leaves() -> None:
    """A parameter that is passed as an input must get the sum of the microbatches' gradients."""
    inputs = torch.randn(3, 64, 64, device="cuda")
    scale = torch.nn.Parameter(torch.ones(64, 64, device="cuda"))
    graphed = make_graphed_callables(
        _Scale(), (torch.randn_like(inputs[0]), torch.ones_like(scale).requires_grad_())
    )
    for inp in inputs:
        graphed(inp, scale).sum().backward()
    assert torch.equal(scale.grad, inputs[0] + inputs[1] + inputs[2])
