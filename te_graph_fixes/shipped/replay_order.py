"""Whether what a graph reads is still there: the order in which the graphs of one memory pool are replayed.

Graphs of one memory pool write where they wrote at capture. The data that graph X leaves for graph Y (a forward for its
dgrad, a dgrad for its wgrad) is untouched by graphs that were captured between the two, since it was in use then, but
not by others: those captured before X may have given up the memory that X got, those captured after Y may have got the
memory that Y reads. So Y may be replayed if **all that was replayed since X was captured between X and Y**.
"""

from __future__ import annotations

from collections.abc import Iterable

RELEASED = -1
"""The position of all graphs that were released: before all others."""


class ReplayOrder:
    """The graphs of one memory pool: the position of each in the sequence of captures, and when it was last replayed.

    Positions go from 1 to ``count``; ``position`` is that of the last replay, and has only gone up since ``run_began``.
    ``now`` counts the replays.
    """

    def __init__(self) -> None:
        self.now = self.run_began = self.position = self.count = 0
        self.times: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self._released: list[int] = []

    def new_position(self) -> int:
        """A position for a graph that is about to be captured. All released graphs count as one from now on."""
        while self._released:
            position = self._released.pop()
            self.times[RELEASED] = max(self.time(RELEASED), self.times.pop(position, 0))
        self.count += 1
        return self.count

    def release(self, positions: Iterable[int]) -> None:
        """Forget the graphs at ``positions`` at the next capture, which is the first that may get their memory."""
        for position in positions:
            self.names.pop(position, None)
            self._released.append(position)

    def time(self, position: int) -> int:
        """When the graph at ``position`` was last replayed; 0 if never."""
        return self.times.get(position, 0)

    def note_replay(self, position: int) -> None:
        """Note that the graph at ``position`` is replayed now."""
        self.now += 1
        if position <= self.position:
            self.run_began = self.now
        self.position = position
        self.times[position] = self.now

    def require_untouched(self, what: str, first: int, since: int, end: int, before: str) -> None:
        """RuntimeError unless all that was replayed after ``since`` was captured between ``first`` and ``end``.

        The graph at ``first`` was replayed at ``since``. The error calls that ``before``, and says ``what`` reads it.
        """
        if since >= self.run_began and self.position < end:
            return  # Positions have only gone up since then, and not as far as the end.
        time, position = max((time, position) for position, time in self.times.items() if not first < position < end)
        if time > since:
            raise RuntimeError(
                f"the {what} cannot be replayed: {self.names.get(position, 'a graph that was released')} was replayed "
                f"since {before}, and may have overwritten what it reads. Graphs that share memory are replayed in the "
                "sequence of their capture (`_order`), each once before its backward. If a step has more microbatches "
                "than at the capture, or another schedule, capture again for it; for several backwards of one forward "
                "capture with retain_graph_in_backward=True"
            )
