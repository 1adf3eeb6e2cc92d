"""Graphs that draw from the current generators of an RNG tracker, as eager training does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker, get_all_rng_states, graph_safe_rng_available


def graph_factory() -> Callable[[], Any]:
    """Return a function that creates graphs for the current RNG tracker, or plain graphs if no tracker has states."""
    plain: Callable[[], Any] = torch.cuda.CUDAGraph
    states = get_all_rng_states()
    if not states or not graph_safe_rng_available():
        return plain
    trackers = (tracker for tracker in gc.get_objects() if issubclass(type(tracker), CudaRNGStatesTracker))
    tracked = _Tracked(next((tracker for tracker in trackers if tracker.states_ is states), None))

    class Graph(torch.cuda.CUDAGraph):  # type: ignore[misc,unused-ignore]
        def replay(self) -> None:
            """Replay, and advance the tracker's generators by the numbers drawn in the graph."""
            replaced = tracked.replaced()
            for captured, current in replaced:
                captured.set_state(current.get_state())
            super().replay()
            for captured, current in replaced:
                current.set_state(captured.get_state())

    return Graph


class _Tracked:
    """The generators of a tracker at a capture, from which the graphs draw.

    The tracker is None if ``gc.freeze()`` hides it. The newest generators of any tracker are then used, as in TE's
    capture.
    """

    def __init__(self, tracker: CudaRNGStatesTracker | None) -> None:
        self._tracker = None if tracker is None else weakref.ref(tracker)
        self._captured = dict(self._states())

    def _states(self) -> dict[str, torch.Generator]:
        if self._tracker is None:
            return get_all_rng_states()  # type: ignore[no-any-return,unused-ignore]
        tracker = self._tracker()
        return tracker.states_ if tracker else {}

    def replaced(self) -> list[tuple[torch.Generator, torch.Generator]]:
        """Return each captured generator that the tracker has replaced, with its replacement."""
        now = self._states()
        pairs = [(captured, now.get(name, captured)) for name, captured in self._captured.items()]
        return [(captured, current) for captured, current in pairs if captured is not current]
