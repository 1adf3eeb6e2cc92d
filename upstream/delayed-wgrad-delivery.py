"""The gradients of a replayed backward_dw must reach the parameters."""

import pytest
import torch
from transformer_engine.pytorch import GroupedLinear, LayerNormMLP, Linear, make_graphed_callables


def _delayed_wgrads(module_class, *, graphed: bool) -> dict:
    """Return each parameter's gradient (or None) after one microbatch, by name."""
    torch.manual_seed(1)
    kwargs = {"bias": True, "params_dtype": torch.bfloat16, "device": "cuda"}
    kwargs["delay_wgrad_compute"] = True
    if module_class is GroupedLinear:
        module = GroupedLinear(2, 128, 128, **kwargs)
        forward = module.forward
        module.forward = lambda inp: forward(inp, [64, 64])
    else:
        module = module_class(128, 128, **kwargs)
    inp = torch.randn(128, 128, dtype=torch.bfloat16, device="cuda")
    run = module
    if graphed:
        (run,) = make_graphed_callables(
            (module,),
            [(torch.randn_like(inp).requires_grad_(),)],
            _order=[1, -1, -1.5],
            _num_layers_per_chunk=[1],
            allow_unused_input=True,
        )
    for param in module.parameters():
        param.grad = None
    run(inp.clone().requires_grad_()).sum().backward()
    run.backward_dw()
    return {name: param.grad for name, param in module.named_parameters()}


@pytest.mark.parametrize("module_class", (Linear, GroupedLinear, LayerNormMLP))
def test_make_graphed_callables_delivers_delayed_wgrads(module_class) -> None:
    """Biases, and weights without a fused wgrad, must get the gradients of eager training."""
    expected = _delayed_wgrads(module_class, graphed=False)
    found = _delayed_wgrads(module_class, graphed=True)
    missing = [name for name, grad in found.items() if grad is None]
    assert not missing
    wrong = [name for name, grad in found.items() if not torch.equal(grad, expected[name])]
    assert not wrong
