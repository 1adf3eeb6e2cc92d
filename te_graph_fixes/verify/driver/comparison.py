"""Whether two runs of a program gave the same."""

from __future__ import annotations

import math
from typing import Any

import torch

from .events import OF_GRAPHS


def differences(found: Any, wanted: Any) -> dict[str, float]:
    """Where two runs differ, with the largest error: the norm of the difference over the norm of what is wanted."""
    errors = {}
    for name in sorted({*wanted, *found} - {OF_GRAPHS}):
        pairs = list(zip(found.get(name, ()), wanted.get(name, ()), strict=False))
        same = len(found.get(name, ())) == len(wanted.get(name, ()))
        if not same or not all(map(equal, *zip(*pairs, strict=True))) if pairs else not same:
            errors[name] = max((error(*pair) for pair in pairs), default=1.0) if same else 1.0
    return errors


def equal(found: torch.Tensor | None, wanted: torch.Tensor | None) -> bool:
    if found is None or wanted is None:
        return found is wanted
    same = found.shape == wanted.shape and found.dtype == wanted.dtype
    return same and bool(torch.equal(found.nan_to_num(9e9), wanted.nan_to_num(9e9)))


def error(found: torch.Tensor | None, wanted: torch.Tensor | None) -> float:
    if equal(found, wanted):
        return 0.0
    if found is None or wanted is None or found.shape != wanted.shape:
        return 1.0
    result = float((found.double() - wanted.double()).norm() / wanted.double().norm())
    return result if math.isfinite(result) else math.inf
