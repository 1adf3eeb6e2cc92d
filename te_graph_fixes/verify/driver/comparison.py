"""Whether two runs of a program gave the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...checking.difference import off_by
from .events import OF_GRAPHS


def errors(graphed: Any, eager: Any) -> dict[str, float]:
    """By all that is compared, the largest error: the norm of the difference over the norm of the eager value."""
    names = sorted({*eager, *graphed} - {OF_GRAPHS})
    return {name: error(graphed.get(name, ()), eager.get(name, ())) for name in names}


def differences(graphed: Any, eager: Any) -> dict[str, float]:
    """Those of the `errors` that are not 0.0."""
    return {name: size for name, size in errors(graphed, eager).items() if size}


def error(graphed: Sequence[torch.Tensor | None], eager: Sequence[torch.Tensor | None]) -> float:
    """The largest error of a tensor. 0.0 is bit for bit; missing tensors are an error of 1.0."""
    return max(map(_error, graphed, eager), default=0.0) if len(graphed) == len(eager) else 1.0


def _error(graphed: torch.Tensor | None, eager: torch.Tensor | None) -> float:
    if graphed is None or eager is None:
        return 0.0 if graphed is eager else 1.0
    if graphed.shape != eager.shape or graphed.dtype != eager.dtype:
        return 1.0
    return float(off_by(graphed, eager))
