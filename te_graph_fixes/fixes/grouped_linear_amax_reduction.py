"""Bug: graphs of GroupedLinear contain the reduction of the backward's amaxes.

Upstream: none yet, TE 2.10 to main (TE up to 2.9 does not reduce in a capture)

Experts may be captured after some steps, as in Megatron-Core, or captured again. The graph then contains the reduction
for all modules registered at that time. Each replay of the backward rolls their amax histories and computes new scales,
in addition to the update after the replay. With several ranks, the graph contains a collective. Other modules do not
reduce amaxes during a capture, because TE does this at each replay. With the fix, neither does GroupedLinear.
"""

from ..fix import Fix

PATCH = """
@@ module/grouped_linear.py _GroupedLinear (at least once)
+from ..graph import is_graph_capturing
-if ctx.reduce_and_update_bwd_fp8_tensors:
+if ctx.reduce_and_update_bwd_fp8_tensors and not is_graph_capturing():
     FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
"""

FIX = Fix(
    symptom="delayed scaling, experts captured after some steps: each replay changes FP8 scales (relative error 1.41)",
    group="FP8 state",
    affects="DelayedScaling (Megatron --fp8-recipe delayed) with captured te.GroupedLinear (--moe-grouped-gemm)",
    patch=PATCH,
)
