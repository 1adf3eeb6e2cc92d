"""Make graphs draw from the current generators of an RNG tracker, as eager training does."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker, get_all_rng_states, graph_safe_rng_available

trackers: "weakref.WeakSet[CudaRNGStatesTracker]" = weakref.WeakSet()


class Generators:
    """The generators of the current RNG tracker at a capture, from which the graphs draw.

    The tracker is None if its `__init__` ran before the fix was applied, or did not run, as in copies. The newest
    generators of any tracker are then used, as in TE's capture.
    """

    def __init__(self) -> None:
        states = get_all_rng_states() if graph_safe_rng_available() else {}
        tracker = next((tracker for tracker in trackers if tracker.states_ is states), None)
        self._tracker = None if tracker is None else weakref.ref(tracker)
        self._captured = dict(states)

    def add_to(self, replay: Any) -> None:
        """Add `lend` to the steps of a callable's replays, if an RNG tracker had generators at the capture."""
        if self._captured:
            replay.add("forward prepare", "lend generators", self.lend)
            replay.add("backward prepare", "lend generators", self.lend)
            replay.add("wgrad prepare", "lend generators", self.lend)

    def lend(self, *_: Any) -> Callable[[], None] | None:
        """Copy the states of the tracker's new generators to the captured generators that they replace.

        Return a function that copies the states back, or None if no generator was replaced.
        """
        if not (replaced := self._replaced()):
            return None
        _copy_states(replaced)
        return partial(_copy_states, [(current, captured) for captured, current in replaced])

    def _replaced(self) -> list[tuple[torch.Generator, torch.Generator]]:
        """Return each captured generator that the tracker has replaced, with its replacement."""
        if self._tracker is None:
            now = get_all_rng_states()
        else:
            tracker = self._tracker()
            now = tracker.states_ if tracker else {}
        pairs = [(captured, now.get(name, captured)) for name, captured in self._captured.items()]
        return [(captured, current) for captured, current in pairs if captured is not current]


def _copy_states(pairs: list[tuple[torch.Generator, torch.Generator]]) -> None:
    for to, source in pairs:
        to.set_state(source.get_state())
