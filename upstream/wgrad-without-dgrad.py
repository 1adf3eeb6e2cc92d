"""A backward must reach a graph whose parameters all have delayed wgrads."""

import torch
from transformer_engine.pytorch import Linear, make_graphed_callables


def test_make_graphed_callables_delayed_wgrad_of_first_layer() -> None:
    """The output of a layer without bias must need a gradient, even if the input needs none."""
    module = Linear(
        128,
        128,
        bias=False,
        params_dtype=torch.bfloat16,
        device="cuda",
        delay_wgrad_compute=True,
    )
    inp = torch.randn(128, 128, dtype=torch.bfloat16, device="cuda")
    graphed = make_graphed_callables(module, (torch.randn_like(inp),))
    out = graphed(inp)
    assert out.requires_grad
    out.backward(torch.randn_like(out))
