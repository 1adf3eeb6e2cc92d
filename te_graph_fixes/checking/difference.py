"""The relative error of a tensor, for the check of a user's job and for `verify`."""

import math

import torch

CHUNK = 1 << 22  # elements compared at a time; each needs about 32 bytes of memory


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the norm of the difference, divided by the norm of ``expected``, as a scalar tensor.

    The result is 0.0 for equal tensors (NaN equals NaN), and inf if the shapes differ or the quotient is not finite.
    """
    total = torch.zeros(3, dtype=torch.float64, device=actual.device)
    if actual.shape != expected.shape:
        return total[0] + math.inf
    plain = [tensor.dequantize() if hasattr(tensor, "_quantizer") else tensor for tensor in (actual, expected)]
    for a, b in zip(*(tensor.detach().reshape(-1).split(CHUNK) for tensor in plain), strict=True):
        unequal = (a != b) & ~(a.isnan() & b.isnan())
        a, b = a.double(), b.double()
        total += torch.stack((unequal.sum(), (a - b).square().sum(), b.square().sum()))
    unequal, difference, norm = total
    return torch.where(unequal > 0, (difference / norm).sqrt().nan_to_num(math.inf, math.inf), 0.0)
