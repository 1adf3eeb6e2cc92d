"""Graphs that draw random numbers as eager training does, whatever generators an RNG tracker has by their replay."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformer_engine.pytorch.distributed import (
    CudaRNGStatesTracker,
    get_all_rng_states,
    graph_safe_rng_available,
)


def graph_maker() -> Callable[[], Any]:
    """What makes graphs that are to be captured now; plain ones where no RNG tracker has states."""
    plain: Callable[[], Any] = torch.cuda.CUDAGraph
    states = get_all_rng_states()
    if not states or not graph_safe_rng_available():
        return plain
    tracked = _Tracked(states)

    def make() -> _Graph:
        graph = _Graph()
        graph.tracked = tracked
        return graph

    return make


def note_tracker(tracker: CudaRNGStatesTracker) -> None:
    """Note whose states those of a capture were: ``tracker`` is about to have others."""
    for tracked in _all_tracked:
        if tracked.states is tracker.states_:
            tracked.tracker = weakref.ref(tracker)


class _Tracked:
    """The states that a tracker has at a capture, with the generators from which the graphs draw.

    TE's captures do not know the ``tracker``; it tells of itself when it exchanges its states.
    """

    def __init__(self, states: dict[str, torch.Generator]) -> None:
        self.states, self._captured = states, dict(states)
        self.tracker: Callable[[], CudaRNGStatesTracker | None] = lambda: None
        _all_tracked.add(self)

    def replaced(self) -> list[tuple[torch.Generator, torch.Generator]]:
        """The generators that are not the tracker's any more, each with the one that it has instead."""
        tracker = self.tracker()
        now = tracker.states_ if tracker else self.states
        pairs = [(captured, now.get(name, captured)) for name, captured in self._captured.items()]
        return [(captured, current) for captured, current in pairs if captured is not current]


_all_tracked: weakref.WeakSet[_Tracked] = weakref.WeakSet()


class _Graph(torch.cuda.CUDAGraph):  # type: ignore[misc,unused-ignore]
    tracked: _Tracked

    def replay(self) -> None:
        """Replay, and let the tracker's generators have drawn what the graph draws."""
        replaced = self.tracked.replaced()
        for captured, current in replaced:
            captured.set_state(current.get_state())
        super().replay()
        for captured, current in replaced:
            current.set_state(captured.get_state())
