"""``fp8-weight-transposes``: replays compute dgrads with transposes of FP8 primary weights from before the last update.

Upstream: none yet, TE 2.10 to main

A replay runs no Python that could make the transposes which its dgrad reads, and they are lost in two ways:

1. ``quantize_master_weights`` (``cast_master_weights_to_fp8``) with its default arguments, as ZeRO optimizers call it,
   marks them invalid, or drops the columnwise data of block scaling, and leaves them to the next forward;
2. the quantizers of modules that were built under ``torch.no_grad()`` have no columnwise use, so each ``copy_`` by an
   optimizer drops the transpose, and leaves it to the next backward.

The graph now holds the transposes that it reads, and before its replay those are made again that are invalid, gone or
elsewhere (`te_graph_fixes/shipped/fp8_weights.py`).
"""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables (2 times)
 graph_callables[ANY_INDEX] = func
+from ._te_fp8_weights import PrimaryWeights
+
+fwd_graph.primary_weights = PrimaryWeights(func if is_training else None)

@@ graph.py _make_graphed_callables.Graphed.forward (at its start)
+fwd_graph.primary_weights.refresh()
"""

FIX = Fix(
    symptom="FP8 parameters built under no_grad or given by quantize_master_weights: dgrads off by 1.0",
    group="FP8 state",
    affects="FP8 parameters (quantized_model_init) with quantize_master_weights (ZeRO), or built under no_grad",
    cost="a transpose before the replay, for each weight that has lost its own",
    patch=PATCH,
    provides=("fp8_weights",),
)
