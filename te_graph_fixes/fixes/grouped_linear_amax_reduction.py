"""``grouped-linear-amax-reduction``: GroupedLinear's reduction of the backward's amaxes becomes part of its graph.

Upstream: none yet, TE 2.10 to main (up to 2.9 it was left out of captures)

Experts that are captured after some steps, as Megatron-Core does, or again, capture the reduction with all modules that
are registered by then. Each replay of their backward rolls the amax histories of those and makes new scales from them,
besides what its end does; with several ranks the graph holds a collective. Other modules do not reduce while a graph is
captured, since the replay does. GroupedLinear does not either now.
"""

from ..fix import Fix

PATCH = """
@@ module/grouped_linear.py _GroupedLinear.backward
+from ..graph import is_graph_capturing
-if ctx.reduce_and_update_bwd_fp8_tensors:
+if ctx.reduce_and_update_bwd_fp8_tensors and not is_graph_capturing():
     FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
@@ module/grouped_linear.py _GroupedLinear._backward_grouped_tensor (if there)
+from ..graph import is_graph_capturing
-if ctx.reduce_and_update_bwd_fp8_tensors:
+if ctx.reduce_and_update_bwd_fp8_tensors and not is_graph_capturing():
     FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
"""

FIX = Fix(
    symptom="delayed scaling, experts captured after some steps: FP8 scales change at each replay, off by 1.41",
    group="FP8 state",
    affects="DelayedScaling (Megatron --fp8-recipe delayed) with captured te.GroupedLinear (--moe-grouped-gemm)",
    patch=PATCH,
)
