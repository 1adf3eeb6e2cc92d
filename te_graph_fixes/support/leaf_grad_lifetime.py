"""Copies of the gradients that a graph returns for leaf inputs, because the next replay overwrites its buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def add_copies(replay: Any, static_grads: Sequence[Any], inputs: int) -> None:
    """Make replays return copies of the gradients of leaf inputs, or of any inputs in ``ctx.call.copied_inputs``.

    ``static_grads`` are the gradients in graph memory: those of ``inputs`` user inputs come first, and None stands for
    a gradient that the graph does not compute. TE's autograd function returns them last.
    """
    number = len(static_grads)
    with_grad = [index for index in range(inputs) if static_grads[index] is not None]

    def note_leaves(call: Any) -> None:
        leaves = (index for index in with_grad if call.inputs[index].requires_grad and call.inputs[index].is_leaf)
        call.copied_inputs = [*leaves]

    def copy(ctx: Any, gradients: Any) -> Any:
        if not ctx.call.copied_inputs:
            return gradients
        returned = list(gradients)
        first = len(returned) - number
        for index in ctx.call.copied_inputs:
            if (grad := returned[first + index]) is not None:
                returned[first + index] = grad.clone()
        return tuple(returned)

    if with_grad:
        replay.add("forward prepare", "note leaf inputs", note_leaves)
        replay.add("backward deliver", "copy input gradients", copy)
