"""Check the sequence of replays in one memory pool: no graph may overwrite data that another graph still reads.

A graph writes to the same memory at each replay. Suppose that graph X writes data for graph Y (a forward for its dgrad,
a dgrad for its wgrad). Graphs captured between X and Y do not write to this data, because its memory was in use during
their capture. Other graphs may overwrite it: a graph captured before X may have released memory to X, and a graph
captured after Y may have received memory from Y. So Y may be replayed if **every graph replayed after X was captured
between X and Y**.
"""

import sys
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

RELEASED = -1
"""The position of all released graphs, before all other positions."""
NEVER = sys.maxsize
"""A position or time after all others."""


class MemoryPool:
    """The graphs of one memory pool: their positions in the sequence of captures, and the times of their last replays.

    Positions are 1 to ``count``. ``position`` is the position of the last replay. In the current run of replays, which
    began at the time ``run_began``, positions have only increased. Times are counted in replays, and ``now`` is the
    current time. ``captures`` counts the calls of `make_graphed_callables`. ``records`` maps the position of each
    forward to its `Record`. ``may_recompute`` is True if a checkpoint has run a forward in this run of replays, because
    the checkpoint may run it again. Gradients, and outputs of forwards outside of checkpoints, are then copied.
    """

    def __init__(self) -> None:
        self.now = self.run_began = self.position = self.count = self.captures = 0
        self.may_recompute = False
        self.records: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.times: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self._released: list[int] = []

    def new_position(self) -> int:
        """Return a position for a graph about to be captured, and merge the times of all released graphs."""
        while self._released:
            position = self._released.pop()
            self.times[RELEASED] = max(self.time(RELEASED), self.times.pop(position, 0))
        self.count += 1
        return self.count

    def release(self, positions: Iterable[int]) -> None:
        """Forget the graphs at ``positions`` at the next capture. Only later captures may receive their memory."""
        for position in positions:
            self.names.pop(position, None)
            self._released.append(position)

    def time(self, position: int) -> int:
        """Return the time of the last replay of the graph at ``position``, or 0 if it was never replayed."""
        return self.times.get(position, 0)

    def note_replay(self, position: int) -> None:
        """Note a replay of the graph at ``position``."""
        self.now += 1
        if position <= self.position:
            self.run_began = self.now
        self.position = position
        self.times[position] = self.now

    def require_untouched(self, reader: str, first: int, since: int, end: int, writer: str, advice: str = "") -> None:
        """Raise RuntimeError unless every graph replayed after ``since`` was captured between ``first`` and ``end``.

        The graph at ``first`` was replayed at ``since``. ``writer`` and ``reader`` name both graphs in the error, which
        ends with ``advice``.
        """
        if since >= self.run_began and self.position < end:
            return  # positions only increased since ``since`` and did not reach the end
        time, position = max((time, position) for position, time in self.times.items() if not first < position < end)
        if time > since:
            raise RuntimeError(
                f"the {reader} cannot be replayed: {self.names.get(position, 'a released graph')} was replayed after "
                f"{writer}, and may have overwritten data that this replay needs. Replay graphs that share memory in "
                "the sequence of their capture (`_order`), each once before its backward. For more microbatches than "
                f"at the capture, or another schedule, capture again.{advice}"
            )
