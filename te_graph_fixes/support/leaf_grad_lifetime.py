"""Copies of the gradients that a graph returns for leaf inputs, because the next replay overwrites its buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def note_leaves(call: Any) -> None:
    """Note in ``call.copied_inputs`` the indexes of the inputs that are leaves and need a gradient."""
    leaves = (i for i, x in enumerate(call.inputs) if getattr(x, "requires_grad", False) and x.is_leaf)
    call.copied_inputs = [*leaves]


def copies_of_grads(inputs: int) -> Callable[..., Any]:
    """Return a step that copies the gradients of ``ctx.call.copied_inputs``.

    The backward returns the gradients of this number of ``inputs`` last.
    """

    def copy(ctx: Any, gradients: Any) -> Any:
        if not ctx.call.copied_inputs:
            return gradients
        returned = list(gradients)
        first = len(returned) - inputs
        for index in ctx.call.copied_inputs:
            if (grad := returned[first + index]) is not None:
                returned[first + index] = grad.clone()
        return tuple(returned)

    return copy
