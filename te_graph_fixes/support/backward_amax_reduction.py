"""The flag of the first FP8 module of an autocast, which a replay leaves as the eager module would."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ._te_fp8_state_at_replay import autocast_depth, is_first_module, set_first_module, used_state


class FirstModule:
    """The flag at the replays of one graph.

    TE's replay takes the flag. The steps let it take the flag only if a module did so in the capture. In an autocast
    inside the graph, the first module takes the flag of this autocast.
    """

    def __init__(self, replay: Any) -> None:
        """Add the steps to the replays of the graph."""
        self._used = used_state(replay)
        replay.add("forward prepare", "lend first module", self.lend)
        if self._used.has_first_module:
            replay.add("forward record", "take first module", self.take)

    def lend(self, _call: Any) -> Callable[[], None] | None:
        """Set the flag for TE's replay. Return a function that restores it, or None if it stays as it is."""
        was_first = is_first_module()
        is_taken = self._used.takes_first_module and was_first if autocast_depth() else self._used.has_own_backward
        if not (is_taken or was_first):
            return None
        set_first_module(is_taken)
        return partial(set_first_module, was_first)

    def take(self, ctx: Any, _outputs: Any) -> None:
        """Take the flag of the replay's autocast if an eager module would: if an input or a parameter needs a gradient.

        Parameters that got no gradient in the capture, for example those of a router, are no inputs of ``ctx``.
        """
        if ctx.call.takes_grads and (any(ctx.needs_input_grad) or any(map(_is_trained, self._used.owners))):
            set_first_module(False)


def _is_trained(owner: Any) -> bool:
    """Return whether a parameter of a module needs a gradient."""
    return any(parameter.requires_grad for parameter in owner.parameters())
