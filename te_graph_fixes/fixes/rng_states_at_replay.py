"""Bug: replays draw from the generators that an RNG tracker had at the capture.

Upstream: none yet, TE 2.10 to main

Graphs are registered with the generators of a tracker. After ``reset()`` and ``add()``, or after ``set_states()``, the
tracker has other generators, but the graphs still use the old ones. With the fix, each graph refers to the tracker. If
the tracker has other generators at a replay, their states are copied to the captured generators and back. The tracker
cannot reuse generators in place: ``get_states()`` returns the generators themselves to its callers.
"""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables
+from ._te_rng_states_at_replay import graph_factory
+
+new_graph = graph_factory()
 fwd_graphs = [torch.cuda.CUDAGraph() for _ in ANY]
@@ (at least once)
-torch.cuda.CUDAGraph()
+new_graph()
@@
 if graph_safe_rng_available():
     for _, state in get_all_rng_states().items():
         ...

@@ distributed.py CudaRNGStatesTracker
 self.states_ = states
"""

FIX = Fix(
    symptom="after an RNG tracker's reset() or set_states(), dropout repeats itself or differs from the eager run",
    group="evaluation and checkpoints",
    affects="dropout with an RNG tracker (as in Megatron) that is reset after the capture, or set by a checkpoint",
    patch=PATCH,
)
