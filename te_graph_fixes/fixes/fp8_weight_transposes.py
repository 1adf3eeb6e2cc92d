"""Bug: a replay computes dgrads with transposes of FP8 parameters from before the last update.

Upstream: none yet, TE 2.10 to main

The dgrad of an FP8 parameter reads its transpose. Eager forwards and backwards compute missing transposes, but a replay
runs no Python. Transposes are lost in two ways:

1. ``quantize_master_weights`` (up to TE 2.13: ``cast_master_weights_to_fp8``) with its default arguments marks them as
   invalid, or drops the columnwise data of block scaling. ZeRO optimizers use these defaults. The next forward then
   has to compute the transposes.
2. The quantizers of modules built under ``torch.no_grad()`` produce no columnwise data. Each ``copy_`` by an optimizer
   then drops the transpose, and the next backward has to compute it.

With the fix, a graph owns its transposes. Before a replay, it recomputes transposes that are invalid, missing or moved
(`te_graph_fixes/support/fp8_weights.py`).
"""

from ..fix import Fix
from .shapes import REPLAY_STEPS

PATCH = """
@@ graph.py _make_graphed_callables (2 times)
 graph_callables[ANY_INDEX] = func
+from ._te_fp8_weights import PrimaryWeights
+
+if is_training:
+    PrimaryWeights(replays.of(fwd_graph), func)
"""

FIX = Fix(
    symptom="FP8 parameters built under no_grad or set by quantize_master_weights: wrong dgrads (relative error 1.0)",
    group="FP8 state",
    affects="FP8 parameters (quantized_model_init) with quantize_master_weights (ZeRO), or built under no_grad",
    cost="before a replay, the transposition of each weight whose transpose is not valid",
    patch=REPLAY_STEPS + PATCH,
)
