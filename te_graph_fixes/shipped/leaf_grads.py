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

    The last gradients that it returns are those of the graph's ``inputs``.
    """

    def backward_with_copies(ctx: Any, *grads: Any) -> Any:
        returned = list(backward(ctx, *grads))
        first = len(returned) - inputs
        for index in ctx.inputs_with_copied_grads:
            if (grad := returned[first + index]) is not None:
                returned[first + index] = grad.clone()
        return tuple(returned)

    return backward_with_copies
