"""A capture for training must work without warmup iterations."""

import torch
from transformer_engine.pytorch import Linear, make_graphed_callables


def test_make_graphed_callables_without_warmup() -> None:
    """With ``num_warmup_iters=0``, outputs and gradients must be the same as in eager training."""
    module = Linear(128, 128, bias=False, params_dtype=torch.bfloat16, device="cuda")
    inp = torch.randn(128, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    eager = module(inp)
    (expected_grad,) = torch.autograd.grad(eager.sum(), inp)
    expected = eager.detach()
    del eager  # its autograd graph would join the default stream to the capture
    graphed = make_graphed_callables(
        module, (torch.randn_like(inp).requires_grad_(),), num_warmup_iters=0
    )
    out = graphed(inp)
    (grad,) = torch.autograd.grad(out.sum(), inp)
    assert torch.equal(out, expected)
    assert torch.equal(grad, expected_grad)
