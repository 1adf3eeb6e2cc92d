"""Dgrads must not overwrite inputs of delayed wgrads if callables are captured together."""

import torch
from transformer_engine.pytorch import LayerNormLinear, make_graphed_callables


def _wgrads(*, together: bool) -> list:
    """Return the delayed wgrads of two layers, captured in one call or in one call each."""
    torch.manual_seed(1)
    layers = [
        LayerNormLinear(
            128,
            128,
            bias=False,
            params_dtype=torch.bfloat16,
            device="cuda",
            delay_wgrad_compute=True,
            fuse_wgrad_accumulation=True,
        )
        for _ in range(2)
    ]
    for layer in layers:
        layer.weight.main_grad = torch.zeros(128, 128, device="cuda")
        layer.weight.grad_added_to_main_grad = False
    inp = torch.randn(128, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    for callables in (layers,) if together else ([layer] for layer in layers):
        samples = tuple((inp.detach().clone().requires_grad_(),) for _ in callables)
        make_graphed_callables(tuple(callables), samples)
    for layer in layers:
        layer.weight.main_grad.zero_()
    out = layers[1](layers[0](inp))
    out.backward(torch.ones_like(out))
    for layer in layers:
        layer.backward_dw()
    return [layer.weight.main_grad for layer in layers]


def test_make_graphed_callables_delayed_wgrads_of_several_callables() -> None:
    """Wgrads must not depend on whether callables are captured together or one by one."""
    assert all(map(torch.equal, _wgrads(together=True), _wgrads(together=False)))
