"""A capture must not change main_grad."""

import torch
from transformer_engine.pytorch import Linear, make_graphed_callables


class _OnesGrad(torch.autograd.Function):
    """An identity function whose gradient is always one."""

    @staticmethod
    def forward(ctx, inp: torch.Tensor) -> torch.Tensor:  # pylint: disable=unused-argument
        return inp.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:  # pylint: disable=unused-argument
        return torch.ones_like(grad)


class _LinearWithOnesGrad(Linear):
    """A linear layer with a wgrad other than 0, whatever the output gradients of the warmup are."""

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        return _OnesGrad.apply(super().forward(inp))


def test_make_graphed_callables_keeps_main_grad() -> None:
    """The warmup must not change main_grad."""
    module = _LinearWithOnesGrad(
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
    make_graphed_callables(module, (inp,))
    assert torch.equal(module.weight.main_grad, torch.full((128, 128), 3.0, device="cuda"))
