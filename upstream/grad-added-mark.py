"""A replay must set grad_added_to_main_grad of the weights whose main_grad it changes."""

import torch
from transformer_engine.pytorch import Linear, make_graphed_callables


def test_make_graphed_callables_sets_grad_added_to_main_grad() -> None:
    """A replayed backward must set grad_added_to_main_grad again if a wrapper has cleared it."""
    module = Linear(
        128,
        128,
        bias=False,
        fuse_wgrad_accumulation=True,
        params_dtype=torch.bfloat16,
        device="cuda",
    )
    module.weight.main_grad = torch.zeros(128, 128, device="cuda")
    module.weight.grad_added_to_main_grad = False
    inp = torch.randn(64, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    graphed = make_graphed_callables(module, (torch.randn_like(inp).requires_grad_(),))
    for _ in range(2):
        module.weight.grad_added_to_main_grad = False
        out = graphed(inp)
        out.backward(torch.ones_like(out))
        assert module.weight.grad_added_to_main_grad
