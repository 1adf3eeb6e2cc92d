"""A replay must not copy gradients that no code reads."""

import torch
from transformer_engine.pytorch import Linear, make_graphed_callables


def test_make_graphed_callables_does_not_copy_dummy_wgrads() -> None:
    """With fused wgrads, every replay must return the same dummy gradient."""
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
    graphed = make_graphed_callables(module, (inp,))
    grads = []
    for _ in range(3):
        out = graphed(torch.randn_like(inp).requires_grad_())
        out.backward(torch.randn_like(out))
        grads.append(module.weight.grad)
        module.weight.grad = None
    assert len({grad.data_ptr() for grad in grads}) == 1
