"""Bug: replays draw from the generators that an RNG tracker had at the capture.

Upstream: none yet, TE 2.10 to main

Graphs are registered with the generators of a tracker. After ``reset()`` and ``add()``, or after ``set_states()``, the
tracker has other generators, but the graphs still use the old generators. With the fix, replays refer to the tracker.
If the tracker has other generators at a replay, their states are copied to the captured generators before the replay,
and back after it. The tracker cannot reuse generators in place, because ``get_states()`` returns the generators
themselves to its callers. On TE 2.10 and 2.11, the fix also makes ``set_states()`` update the global states, which a
capture reads.
"""

from ..fix import Fix
from .shapes import REPLAY_STEPS

PATCH = """
@@ graph.py _make_graphed_callables
+from ._te_rng_states_at_replay import Generators
+
+tracked_generators = Generators()
 visited_te_modules = ANY_EMPTY
@@
+tracked_generators.add_to(replays[i])
 ANY_GRAPHED = make_graphed_autograd_function(..., fwd_graphs[i], ...)
@@
 if graph_safe_rng_available():
     for _, state in get_all_rng_states().items():
         ...

@@ distributed.py CudaRNGStatesTracker.__init__ (at its start)
+from ._te_rng_states_at_replay import trackers
+
+trackers.add(self)
+
@@ distributed.py CudaRNGStatesTracker.set_states
 self.states_ = states
 set_all_rng_states(self.states_)
@@ (or)
 self.states_ = states
+set_all_rng_states(self.states_)
"""

FIX = Fix(
    symptom="after an RNG tracker's reset() or set_states(), dropout repeats itself or differs from the eager run",
    group="evaluation and checkpoints",
    affects="dropout with an RNG tracker (as in Megatron) that is reset after the capture, or set by a checkpoint",
    patch=REPLAY_STEPS + PATCH,
)
