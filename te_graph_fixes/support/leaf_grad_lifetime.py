"""Copies of the gradients that a graph returns for leaf inputs, because the next replay overwrites its buffers."""

from collections.abc import Sequence
from typing import Any


def add_copies(replay: Any, static_grads: Sequence[Any], user_inputs: int) -> None:
    """Make replays return copies of the gradients of leaf inputs. `replay-contract` may add other inputs.

    ``static_grads`` are the gradients in graph memory, or None for an input without a gradient. The first
    ``user_inputs`` of them belong to the user's inputs, the rest to parameters. TE's autograd function returns all
    ``static_grads`` after its other results.
    """
    number = len(static_grads)
    with_grad = [index for index in range(user_inputs) if static_grads[index] is not None]

    def note_leaves(call: Any) -> None:
        inputs = call.inputs
        call.copied_inputs = [i for i in with_grad if inputs[i].requires_grad and inputs[i].is_leaf]

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
