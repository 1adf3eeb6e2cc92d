"""At a replay, clear ("take") TE's flag for the first FP8 module of an autocast if the eager module would clear it."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from ._te_fp8_state_at_replay import autocast_depth, is_first_module, set_first_module


def add_take(replay: Any) -> None:
    """Make each replay take (clear) the flag for the first FP8 module if the capture took it."""
    if replay.fp8_state.has_first_module:
        replay.add("forward deliver", "take first module", partial(_take, replay.fp8_state.in_autocast))


def is_in_graph(used: Any) -> bool:
    """Return whether the graph with the FP8 state ``used`` contains the first FP8 module of the current autocast.

    Outside of an autocast, return whether the graph contains an autocast with an FP8 module that has a backward.
    """
    if not autocast_depth():
        return bool(used.has_own_backward)
    return is_first_module() and bool(used.has_first_module or used.has_own_backward)


def _take(owners: Iterable[Any], ctx: Any, outputs: Any) -> Any:
    """Take the flag in grad mode if an input or a parameter needs a gradient, as an eager module does.

    Return ``outputs``. ``ctx.needs_input_grad`` lacks parameters that got no gradient in the capture, such as a
    router's, so the parameters of all ``owners``, the modules in the autocast of the capture, are searched too.
    """
    if ctx.call.takes_grads and (any(ctx.needs_input_grad) or any(map(_is_trained, owners))):
        set_first_module(False)
    return outputs


def _is_trained(owner: Any) -> bool:
    """Return whether any parameter of ``owner``, a module or an operation, needs a gradient."""
    return any(parameter.requires_grad for parameter in owner.parameters())
