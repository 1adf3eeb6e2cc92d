"""Bug: the FP8 weights that a graph caches are freed or outdated while the graph reads them.

Upstream: none yet, TE 2.10 to main

Modules cache quantized weights in ``_fp8_workspaces``. A forward for training replaces a workspace without transposes,
and a forward in another recipe drops all workspaces. The graph still reads the old workspaces, although their memory is
free. In addition, the graph and its modules do not see each other's updates. With the fix, the graph owns its
workspaces. Before a replay it copies newer weights from its modules, or quantizes the modules' weights together with
its own (`te_graph_fixes/support/fp8_weights.py`).
"""

from ..fix import Fix
from .shapes import REPLAY_STEPS

PATCH = """
@@ graph.py _make_graphed_callables (2 times)
 graph_callables[ANY_INDEX] = func
+from ._te_fp8_weights import CachedWeights
+
+CachedWeights(replays.of(fwd_graph), func)
"""

FIX = Fix(
    symptom="graphs for inference and training with cached FP8 weights: illegal memory access, or old weights",
    group="evaluation and checkpoints",
    affects="fp8_weight_caching (Megatron sets it) with a graph for inference, or an evaluation in another recipe",
    cost="memory for the cached FP8 weights of the capture, if modules have replaced them since",
    patch=REPLAY_STEPS + PATCH,
)
