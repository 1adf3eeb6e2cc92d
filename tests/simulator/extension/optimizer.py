"""The functions that ``te.optimizers.FusedAdam`` calls: Adam in float32 for lists of tensors and of FP8 weights."""

from __future__ import annotations

import torch

from ..graph import launch
from .enums import torch_dtype
from .quantize import cast_delayed

__all__ = ["multi_tensor_adam", "multi_tensor_adam_fp8"]

ADAMW = 1


def multi_tensor_adam(chunk, noop, lists, *options):
    """Run one step of Adam. ``lists`` contain gradients, weights, both moments and, if any, the FP32 master weights.

    ``options`` are the learning rate, both betas, epsilon, the step, the mode, whether to correct the bias, and the
    weight decay.
    """
    for grad, weight, *rest in zip(*lists, strict=True):
        _plain(weight)
        launch(_adam, [weight, *rest], noop, grad, weight, rest, options)


def multi_tensor_adam_fp8(chunk, noop, lists, *options):
    """Run one step of Adam on FP8 weights. In ``lists``, scales, amaxes and inverse scales follow the master weights.

    ``options`` are as in `multi_tensor_adam`, followed by the type of the FP8 weights.
    """
    for grad, weight, first, second, master, scale, amax, scale_inv in zip(*lists, strict=True):
        rest = [first, second, master]
        launch(_adam, rest, noop, grad, master, [first, second], options[:-1])
        launch(
            cast_delayed, [weight, amax, scale_inv],
            master, scale, amax, weight, None, scale_inv, noop, torch_dtype(int(options[-1])),
        )  # fmt: skip


def _plain(weight):
    if type(weight) not in (torch.Tensor, torch.nn.Parameter):
        raise RuntimeError(f"multi_tensor_adam does not support weights of type {type(weight).__name__}")


def _adam(noop, grad, weight, rest, options):
    """Run the kernel for one weight. ``rest`` contains both moments and, with master weights, the FP32 weight."""
    if noop.item() == 1:
        return
    rate, beta1, beta2, epsilon, step, mode, corrects, decay = options
    first, second, *master = rest
    value = (master[0] if master else weight).float()
    gradient = grad.float() + (0 if mode == ADAMW else decay * value)
    first.copy_(beta1 * first.float() + (1 - beta1) * gradient)
    second.copy_(beta2 * second.float() + (1 - beta2) * gradient * gradient)
    unbiased = [1 - beta**step if corrects else 1.0 for beta in (beta1, beta2)]
    update = (first.float() / unbiased[0]) / ((second.float() / unbiased[1]).sqrt() + epsilon)
    value = value - rate * (update + (decay * value if mode == ADAMW else 0))
    for target in (weight, *master):
        target.copy_(value)
