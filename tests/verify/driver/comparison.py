"""Compare the results of two runs of a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_graph_fixes.checking.difference import relative_error

from .events import OF_GRAPHS


def errors(graphed: Any, eager: Any) -> dict[str, float]:
    """Return the largest relative error of each result, by name."""
    names = sorted({*eager, *graphed} - {OF_GRAPHS})
    return {name: error(graphed.get(name, ()), eager.get(name, ())) for name in names}


def differences(graphed: Any, eager: Any) -> dict[str, float]:
    """Return the `errors` that are not 0.0, by name; {} if all results are bit-identical."""
    return {name: size for name, size in errors(graphed, eager).items() if size}


def error(graphed: Sequence[torch.Tensor | None], eager: Sequence[torch.Tensor | None]) -> float:
    """Return the largest relative error of the tensors. A missing tensor, and another shape or dtype, count as 1.0."""
    return max(map(_error, graphed, eager), default=0.0) if len(graphed) == len(eager) else 1.0


def _error(graphed: torch.Tensor | None, eager: torch.Tensor | None) -> float:
    if graphed is None or eager is None:
        return 0.0 if graphed is eager else 1.0
    if graphed.shape != eager.shape or graphed.dtype != eager.dtype:
        return 1.0
    return float(relative_error(graphed, eager))
