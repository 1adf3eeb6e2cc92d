"""A capture must not change main_grad."""

import torch
from transformer_engine.pytorch import Linear, make_graphed_callables


def test_make_graphed_callables_keeps_main_grad() -> None:
    """The fused wgrads of the warmup must not stay in main_grad."""
    module = Linear(
        128,
        128,
        bias=False,
        fuse_wgrad_accumulation=True,
        params_dtype=torch.bfloat16,
        device="cuda",
    )
    module.weight.main_grad = torch.full((128, 128), 3.0, device="cuda")
    module.weight.grad_added_to_main_grad = False
    inp = torch.randn(128, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    # Output gradients of the warmup are uninitialized, and may be zero.
    hook = module.register_forward_hook(lambda _module, _inputs, out: _OnesGrad.apply(out))
    make_graphed_callables(module, (inp,))
    hook.remove()
    assert torch.equal(module.weight.main_grad, torch.full((128, 128), 3.0, device="cuda"))


class _OnesGrad(torch.autograd.Function):
    """An identity whose gradient is one."""

    @staticmethod
    def forward(ctx, inp: torch.Tensor) -> torch.Tensor:  # pylint: disable=unused-argument
        return inp.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:  # pylint: disable=unused-argument
        return torch.ones_like(grad)
