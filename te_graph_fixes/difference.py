"""How much a tensor differs from another, as the check of a user's job and `verify` say it."""

from __future__ import annotations

import math

import torch

CHUNK = 1 << 22  # elements that are compared at a time; some 32 bytes of memory for each


def off_by(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The norm of the difference over the norm of what is wanted; 0.0 is bit for bit, and NaN equals NaN."""
    tensors = [each.dequantize() if hasattr(each, "_quantizer") else each for each in (found, wanted)]
    total = torch.zeros(3, dtype=torch.float64, device=found.device)
    if found.shape != wanted.shape:
        return total[0] + math.inf
    for a, b in zip(*(each.detach().reshape(-1).split(CHUNK) for each in tensors), strict=True):
        unequal = (a != b) & ~(a.isnan() & b.isnan())
        a, b = a.double(), b.double()
        total += torch.stack((unequal.sum(), (a - b).square().sum(), b.square().sum()))
    unequal, difference, norm = total
    return torch.where(unequal > 0, (difference / norm).sqrt().nan_to_num(math.inf, math.inf), 0.0)
