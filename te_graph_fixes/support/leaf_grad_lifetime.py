"""Copies of the gradients that a graph returns for leaf inputs, because the next replay overwrites its buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def leaf_inputs(inputs: Sequence[Tensor], number: int) -> list[int]:
    """Return the indexes of leaves that need a gradient, among the first ``number`` inputs of a replay."""
    return [i for i in range(number) if getattr(inputs[i], "requires_grad", False) and inputs[i].is_leaf]


def with_copied_grads(backward: Callable[..., Any], inputs: int) -> Callable[..., Any]:
    """Return a backward that returns copies of the gradients of ``ctx.inputs_with_copied_grads``.

    ``backward`` is the backward of a graph with this number of ``inputs``. It returns their gradients last.
    """

    def backward_with_copies(ctx: Any, *grads: Any) -> Any:
        returned = list(backward(ctx, *grads))
        first = len(returned) - inputs
        for index in ctx.inputs_with_copied_grads:
            if (grad := returned[first + index]) is not None:
                returned[first + index] = grad.clone()
        return tuple(returned)

    return backward_with_copies
