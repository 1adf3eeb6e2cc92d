"""``rng-states-at-replay``: replays draw from the generators that an RNG tracker had at capture, not from those it has.

Upstream: open, TE 2.7 to main

Symptom: after ``tracker.reset()`` and ``add()``, or after ``set_states()``, as in loading a checkpoint, dropout in a
graph goes on with the random numbers of before, and the tracker's are not drawn (outputs off by 0.74 on the simulator).

Graphs are registered with the generators themselves, so TE cannot follow a tracker that gets others. Each graph now
keeps the tracker; where it has other generators at a replay, their states are lent to those of the capture
(`te_graph_fixes/provided/rng_states.py`, shipped beside the patched modules).

``not-needed``: every graph of a capture is one of the maker's.
"""

from __future__ import annotations

from ..fix import Fix, Verdict, applicable, not_needed
from ..provided import new_module
from ..shapes import graph_capture
from ..source import Source, unrecognized

REGISTERED = """
if graph_safe_rng_available():
    for _, state in get_all_rng_states().items():
        ...
"""
PLAIN, FIRST = "torch.cuda.CUDAGraph()", "fwd_graphs = [ANY_MADE for _ in ANY]"
MAKER = """
from ._te_rng_states import graph_maker

new_graph = graph_maker()
"""
MADE = "new_graph()"


def examine(source: Source) -> Verdict:
    capture = graph_capture(source)
    capture.one(REGISTERED)
    tracker = source.module("transformer_engine.pytorch.distributed").definition("CudaRNGStatesTracker")
    tracker.exactly(1, "self.states_ = states")
    (first,), plain = capture.exactly(1, FIRST), capture.all(PLAIN)
    if capture.has(MAKER) and not plain and capture.text(first["ANY_MADE"]) == MADE:
        if new_module(source, "rng_states"):
            raise unrecognized("the module that makes graphs", source.location)
        capture.exactly(1, "new_graph = ANY")
        return not_needed("graphs follow the RNG tracker")
    if first["ANY_MADE"] not in plain or capture.has(MAKER):
        raise unrecognized(f"graphs made by {PLAIN}", capture, f"`{capture.text(first.node)}`")
    return applicable(
        "graphs draw from the generators of their capture",
        [capture.insert_before(first.node, MAKER), *(capture.replace(node, MADE) for node in plain)],
        new_module(source, "rng_states"),
    )


FIX = Fix(
    id="rng-states-at-replay",
    summary="replays draw from the generators that an RNG tracker had at capture",
    symptom="dropout in graphs repeats itself or differs after the tracker's reset() or set_states()",
    upstream=(),
    affected=">=2.7",
    examine=examine,
)
