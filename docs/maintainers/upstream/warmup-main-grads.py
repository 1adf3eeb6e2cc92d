"""Fused wgrads and a capture: exits with 1 if `make_graphed_callables` changes what main_grad holds."""

import sys

import torch
import transformer_engine.pytorch as te

SIZE = 128


class Ones(torch.autograd.Function):
    """Makes the wgrads of warmup, whose output gradients are uninitialised memory, the same in every run."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(grad)


class Layer(te.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Ones.apply(super().forward(x))


layer = Layer(SIZE, SIZE, bias=False, fuse_wgrad_accumulation=True, params_dtype=torch.bfloat16, device="cuda")
layer.weight.main_grad = torch.zeros(SIZE, SIZE, device="cuda")
layer.weight.grad_added_to_main_grad = False
te.make_graphed_callables(layer, (torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda", requires_grad=True),))
norm = float(layer.weight.main_grad.norm())
print(f"main_grad was 0 before the capture, and its norm is {norm:.3g} after it")
sys.exit(norm != 0)
