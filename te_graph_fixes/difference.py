"""How much a tensor differs from another, as the check of a user's job and `verify` say it."""

from __future__ import annotations

import math

import torch
from torch.linalg import vector_norm

SMALLEST = 1e-30  # what large integers differ by may be no number of 32 bits


def off_by(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The norm of the difference over the norm of what is wanted; 0.0 is bit for bit, and NaN equals NaN."""
    if found.shape != wanted.shape:
        return torch.tensor(math.inf, device=found.device)
    a, b = (each.dequantize() if hasattr(each, "_quantizer") else each.detach() for each in (found, wanted))
    unequal = (a != b) & ~(a.isnan() & b.isnan())
    difference, norm = (vector_norm(each, dtype=torch.float64) for each in (a.float() - b.float(), b.float()))
    return torch.where(unequal.any(), (difference / norm).nan_to_num(math.inf).clamp(min=SMALLEST), 0.0)
