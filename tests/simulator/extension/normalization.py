"""LayerNorm and RMSNorm, forward and backward."""

from __future__ import annotations

import torch

from ..graph import launch
from .enums import torch_dtype
from .quantize import cast

__all__ = ["layernorm_bwd", "layernorm_fwd", "rmsnorm_bwd", "rmsnorm_fwd"]


def layernorm_fwd(tensor, weight, bias, eps, out, quantizer, out_dtype, sm_margin, zero_centered_gamma):
    """Return the normalized rows, and the means and reciprocal standard deviations of the input's rows."""
    return _forward(tensor, weight, bias, eps, out, quantizer, out_dtype, zero_centered_gamma)


def rmsnorm_fwd(tensor, weight, eps, out, quantizer, out_dtype, sm_margin, zero_centered_gamma):
    """Return the normalized rows, None (for the means), and the reciprocal root mean squares of the input's rows."""
    result, _, rsigma = _forward(tensor, weight, None, eps, out, quantizer, out_dtype, zero_centered_gamma)
    return result, None, rsigma


def layernorm_bwd(dz, tensor, mu, rsigma, weight, sm_margin, zero_centered_gamma):
    """Return the gradients of the input, of the weight and of the bias."""
    dx, dgamma, dbeta = torch.empty_like(tensor), torch.empty_like(weight), torch.empty_like(weight)
    launch(_backward, [dx, dgamma, dbeta], dx, dgamma, dbeta, dz, tensor, mu, rsigma, weight, zero_centered_gamma)
    return dx, dgamma, dbeta


def rmsnorm_bwd(dz, tensor, rsigma, weight, sm_margin, zero_centered_gamma):
    """Return the gradients of the input and of the weight."""
    dx, dgamma = torch.empty_like(tensor), torch.empty_like(weight)
    launch(_backward, [dx, dgamma], dx, dgamma, None, dz, tensor, None, rsigma, weight, zero_centered_gamma)
    return dx, dgamma


def _forward(tensor, weight, bias, eps, out, quantizer, out_dtype, zero_centered_gamma):
    if out is not None and quantizer is not None:
        raise NotImplementedError("the simulator does not support a normalization with both an output and a quantizer")
    result = torch.empty(tensor.shape, dtype=torch_dtype(out_dtype)) if out is None else out
    rows = tensor.numel() // tensor.shape[-1]
    mu, rsigma = torch.empty(rows, dtype=torch.float32), torch.empty(rows, dtype=torch.float32)
    launch(_normalize, [result, mu, rsigma], result, mu, rsigma, tensor, weight, bias, eps, zero_centered_gamma)
    return cast(result, quantizer), mu, rsigma


def _gamma(weight, zero_centered):
    return weight.float() + 1.0 if zero_centered else weight.float()


def _normalize(result, mu, rsigma, tensor, weight, bias, eps, zero_centered_gamma):
    """Normalize rows. Without a bias, this is RMSNorm, which assumes a mean of zero."""
    values = tensor.float().reshape(-1, tensor.shape[-1])
    if bias is None:
        mu.zero_()
    else:
        mu.copy_(values.mean(dim=1))
    centered = values - mu.unsqueeze(1)
    rsigma.copy_(torch.rsqrt(centered.square().mean(dim=1) + eps))
    normalized = centered * rsigma.unsqueeze(1) * _gamma(weight, zero_centered_gamma)
    result.copy_((normalized if bias is None else normalized + bias.float()).view(result.shape))


def _backward(dx, dgamma, dbeta, dz, tensor, mu, rsigma, weight, zero_centered_gamma):
    grad = dz.float().reshape(-1, tensor.shape[-1])
    values = tensor.float().reshape(-1, tensor.shape[-1])
    normalized = (values if mu is None else values - mu.unsqueeze(1)) * rsigma.unsqueeze(1)
    weighted = grad * _gamma(weight, zero_centered_gamma)
    change = weighted - normalized * (weighted * normalized).mean(dim=1, keepdim=True)
    if mu is not None:
        change = change - weighted.mean(dim=1, keepdim=True)
    dx.copy_((change * rsigma.unsqueeze(1)).view(dx.shape))
    dgamma.copy_((grad * normalized).sum(dim=0))
    if dbeta is not None:
        dbeta.copy_(grad.sum(dim=0))
