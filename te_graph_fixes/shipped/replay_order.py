"""Whether what a graph reads is still there: the order in which the graphs of one memory pool are replayed.

Graphs of one memory pool write where they wrote at capture. What graph X leaves for graph Y (a forward for its dgrad, a
dgrad for its wgrad) is untouched by what was captured between the two, since it was in use then, and by nothing else:
what was captured before X may have given up the memory that X got, what was captured after Y may have got what Y
reads. So Y may be replayed if **all that was replayed since X was captured between X and Y**.
"""

from __future__ import annotations

from collections.abc import Iterable

RELEASED = -1
"""The place of all graphs that were released: before all others."""


class ReplayOrder:
    """The graphs of one memory pool: the place of each in the sequence of captures, and when it was last replayed.

    Places are counted from 1, and ``now`` counts the replays. Places have only gone up since the replay ``run_began``.
    """

    def __init__(self) -> None:
        self.now = self.run_began = self.place = self.places = 0
        self.times: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self._released: list[int] = []

    def new_place(self) -> int:
        """A place for a graph that is about to be captured. What was released counts as one graph from now on."""
        while self._released:
            place = self._released.pop()
            self.times[RELEASED] = max(self.time(RELEASED), self.times.pop(place, 0))
        self.places += 1
        return self.places

    def release(self, places: Iterable[int]) -> None:
        """Forget the graphs at ``places`` at the next capture, which is the first that may get their memory."""
        for place in places:
            self.names.pop(place, None)
            self._released.append(place)

    def time(self, place: int) -> int:
        """When the graph at ``place`` was last replayed; 0 if never."""
        return self.times.get(place, 0)

    def note_replay(self, place: int) -> None:
        """Note that the graph at ``place`` is replayed now."""
        self.now += 1
        if place <= self.place:
            self.run_began = self.now
        self.place = place
        self.times[place] = self.now

    def require_untouched(self, what: str, first: int, since: int, end: int, before: str) -> None:
        """RuntimeError unless all that was replayed after ``since`` was captured between ``first`` and ``end``.

        The graph at ``first`` was replayed at ``since``. The error calls that ``before``, and says ``what`` reads it.
        """
        if since >= self.run_began and self.place < end:
            return  # Places have only gone up since then, and not as far as the end.
        time, place = max((time, place) for place, time in self.times.items() if not first < place < end)
        if time > since:
            raise RuntimeError(
                f"the {what} cannot be replayed: {self.names.get(place, 'a graph that was released')} was replayed "
                f"since {before}, and may have overwritten what it reads. Graphs that share memory are replayed in the "
                "sequence of their capture (`_order`), each once before its backward. If a step has more microbatches "
                "than at the capture, or another schedule, capture again for it; for several backwards of one forward "
                "capture with retain_graph_in_backward=True"
            )
