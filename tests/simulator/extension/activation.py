"""Activation functions and their backward passes, plain and fused with quantization or a bias gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..graph import launch
from .quantize import bgrad_quantize, cast


def gelu_value(x):
    """Return GELU with the tanh approximation, as in TE."""
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x):
    return torch.relu(x).square()


def _gated(function):
    def gated(x):
        activated, gate = x.chunk(2, dim=-1)
        return function(activated) * gate

    return gated


_FUNCTIONS = {
    "gelu": gelu_value, "qgelu": _quick_gelu, "relu": torch.relu, "srelu": _squared_relu, "silu": F.silu,
}  # fmt: skip
_GATED = {
    "geglu": _gated(gelu_value), "glu": _gated(torch.sigmoid), "qgeglu": _gated(_quick_gelu),
    "reglu": _gated(torch.relu), "sreglu": _gated(_squared_relu), "swiglu": _gated(F.silu),
}  # fmt: skip


def _forward(function, halves):
    def activation(tensor, quantizer):
        width = tensor.shape[-1] // 2 if halves else tensor.shape[-1]
        out = torch.empty([*tensor.shape[:-1], width], dtype=tensor.dtype)
        launch(_activate, [out], out, tensor, function)
        return cast(out, quantizer)

    return activation


def _backward(function):
    def activation_backward(grad, tensor, quantizer):
        return cast(_gradient(function, grad, tensor), quantizer)

    return activation_backward


def _backward_with_bias(function):
    def activation_backward(grad, tensor, quantizer):
        return bgrad_quantize(_gradient(function, grad, tensor), quantizer)

    return activation_backward


def _gradient(function, grad, tensor):
    result = torch.empty(tensor.shape, dtype=tensor.dtype)
    launch(_differentiate, [result], result, grad, tensor, function)
    return result


def _activate(out, tensor, function):
    out.copy_(function(tensor.float()))


def _differentiate(result, grad, tensor, function):
    with torch.enable_grad():
        at = tensor.float().detach().requires_grad_()
        (gradient,) = torch.autograd.grad(function(at), at, grad.float())
    result.copy_(gradient)


_public = {}
for _name, _function in _FUNCTIONS.items():
    _public[_name] = _forward(_function, halves=False)
    _public[f"dbias_d{_name}"] = _backward_with_bias(_function)
for _name, _function in _GATED.items():
    _public[_name] = _forward(_function, halves=True)
for _name, _function in (_FUNCTIONS | _GATED).items():
    _public[f"d{_name}"] = _backward(_function)

globals().update(_public)
__all__ = list(_public)
