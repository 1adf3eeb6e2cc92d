"""A backward must reach a graph whose parameters all have delayed wgrads."""

import torch
from transformer_engine.pytorch import Linear, make_graphed_callables


def test_make_graphed_callables_delayed_wgrad_of_first_layer() -> None:
    """A layer without bias whose input needs no gradient must get its wgrad."""
    module = Linear(
        128,
        128,
        bias=False,
        params_dtype=torch.bfloat16,
        device="cuda",
        delay_wgrad_compute=True,
        fuse_wgrad_accumulation=True,
    )
    module.weight.main_grad = torch.zeros(128, 128, device="cuda")
    module.weight.grad_added_to_main_grad = False
    inp = torch.randn(128, 128, dtype=torch.bfloat16, device="cuda")
    grad = torch.randn_like(inp)
    graphed = make_graphed_callables(module, (torch.randn_like(inp),), allow_unused_input=True)
    module.weight.main_grad.zero_()
    graphed(inp).backward(grad)
    graphed.backward_dw()
    expected = grad.float().t() @ inp.float()
    torch.testing.assert_close(module.weight.main_grad, expected)
