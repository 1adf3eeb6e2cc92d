"""``rng-states-at-replay``: replays draw from the generators that an RNG tracker had at capture, not from those it has.

Upstream: none yet, TE 2.10 to main

Graphs are registered with the generators themselves, so TE cannot follow a tracker that gets others by ``reset()`` and
``add()``, or by ``set_states()``. Each graph now keeps the tracker; where it has other generators at a replay, their
states are lent to those of the capture (`te_graph_fixes/shipped/rng_states.py`).
"""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables
+from ._te_rng_states import graph_maker
+
+new_graph = graph_maker()
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
    symptom="dropout repeats itself, or differs from eager, after an RNG tracker's reset() or set_states()",
    group="evaluation and checkpoints",
    affects="dropout with an RNG tracker (Megatron has one) that is reset or set after the capture, as by loading",
    patch=PATCH,
    provides=("rng_states",),
)
