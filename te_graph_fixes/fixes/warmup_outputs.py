"""Bug: a warmup iteration retains the outputs of all forwards until it ends.

Upstream: https://github.com/NVIDIA/TransformerEngine/pull/3427 (TE 2.20)

From TE 2.19 on, the warmup runs the forwards and backwards of all callables in the order of the capture. It retains the
outputs of each forward, with all tensors that autograd saved for them, until the end of the iteration. The outputs stay
even after their backward, and in a capture for evaluation, which runs no backward. With the fix, outputs are released
after their backward, and immediately in a capture for evaluation.
"""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables
 warmup_outputs = []
 for func_idx, func in zip(warmup_func_idx, warmup_func):
     outputs = ANY_FORWARD
-    warmup_outputs.append((func_idx, func, outputs))
+    if is_training:
+        warmup_outputs.append((func_idx, func, outputs))
+    del outputs
 if is_training:
-    for func_idx, func, outputs in reversed(warmup_outputs):
-        ANY_BACKWARD(func_idx, func, outputs, ANY_ITERATION, func_idx)
+    while warmup_outputs:
+        func_idx, func, outputs = warmup_outputs.pop()
+        ANY_BACKWARD(func_idx, func, outputs, ANY_ITERATION, func_idx)
+        del outputs
@@
-per_fwd_outputs[per_callable_fwd_idx] = outputs
+if is_training:
+    per_fwd_outputs[per_callable_fwd_idx] = outputs
+del outputs
@@
-outputs = per_fwd_outputs[per_callable_bwd_idx]
+outputs = per_fwd_outputs.pop(per_callable_bwd_idx)
 ANY_BACKWARD(per_callable_bwd_idx, func, outputs, ...)
+del outputs
"""

UPSTREAM = """
@@ graph.py _make_graphed_callables
 while warmup_outputs:
     ANY_INDEX, ANY_FUNC, ANY_OUTPUTS = warmup_outputs.pop()
     ...
     del ANY_OUTPUTS
@@
 ANY_OUTPUTS = per_fwd_outputs.pop(per_callable_bwd_idx)
"""

EARLIER = """
@@ graph.py _make_graphed_callables
 for ANY_INDEX, ANY_FUNC in zip(warmup_func_idx, warmup_func):
     ...
     for ANY_ITERATION in range(num_warmup_iters):
         ...
         del ANY_OUTPUTS, ANY_GRADS
     ...
"""

FIX = Fix(
    symptom="the peak memory of a capture is a quarter higher than necessary",
    group="speed",
    affects="pipelines (Megatron --pipeline-model-parallel-size): an _order with many microbatches and model chunks",
    since="2.19",
    merged="2.20",
    patch=PATCH,
    corrected=[
        (UPSTREAM, "warmup releases outputs after their last use"),
        (EARLIER, "warmup runs one callable after the other, and retains no outputs"),
    ],
)
