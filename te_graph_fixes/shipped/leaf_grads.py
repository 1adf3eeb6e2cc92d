"""Gradients that a graph returns for leaf inputs, as copies: a leaf keeps what it gets, a graph writes there again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def leaf_inputs(inputs: Sequence[Tensor], number: int) -> list[int]:
    """Those of the first ``number`` inputs of a replay that keep their gradient: the leaves of autograd's graph."""
    return [i for i in range(number) if getattr(inputs[i], "requires_grad", False) and inputs[i].is_leaf]


def with_copied_grads(backward: Callable[..., Any], inputs: int) -> Callable[..., Any]:
    """The ``backward`` of a graph with copies of the gradients that ``ctx.inputs_with_copied_grads`` names.

    What it returns ends with the gradients of the graph's ``inputs``.
    """

    def backward_with_copies(ctx: Any, *grads: Any) -> Any:
        returned = backward(ctx, *grads)
        if not ctx.inputs_with_copied_grads:
            return returned
        copied = list(returned)
        first = len(copied) - inputs
        for index in ctx.inputs_with_copied_grads:
            grad = copied[first + index]
            copied[first + index] = None if grad is None else grad.clone()
        return tuple(copied)

    return backward_with_copies
