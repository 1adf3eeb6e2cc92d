"""Whether two runs of a program gave the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...difference import off_by
from .events import OF_GRAPHS


def errors(found: Any, wanted: Any) -> dict[str, float]:
    """By all that is compared, the largest error: the norm of the difference over the norm of what is wanted."""
    result = {}
    for name in sorted({*wanted, *found} - {OF_GRAPHS}):
        result[name] = error(found.get(name, ()), wanted.get(name, ()))
    return result


def differences(found: Any, wanted: Any) -> dict[str, float]:
    """Those of the `errors` that are not 0.0."""
    return {name: size for name, size in errors(found, wanted).items() if size}


def error(found: Sequence[torch.Tensor | None], wanted: Sequence[torch.Tensor | None]) -> float:
    """The largest error of a tensor. 0.0 is bit for bit; missing tensors are an error of 1.0."""
    return max(map(_error, found, wanted), default=0.0) if len(found) == len(wanted) else 1.0


def _error(found: torch.Tensor | None, wanted: torch.Tensor | None) -> float:
    if found is None or wanted is None:
        return 0.0 if found is wanted else 1.0
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return 1.0
    return float(off_by(found, wanted))
