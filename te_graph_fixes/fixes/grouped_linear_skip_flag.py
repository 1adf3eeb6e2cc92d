"""Bug: graphs of FP8 experts ignore the skip flag, which tells a graph whether to quantize.

Upstream: https://github.com/NVIDIA/TransformerEngine/pull/3051,
https://github.com/NVIDIA/TransformerEngine/pull/3052,
https://github.com/NVIDIA/TransformerEngine/pull/3065 (TE 2.17)

`GroupedLinear.forward` passes ``None`` to `_GroupedLinear` as ``skip_fp8_weight_update``. A graph with cached weights
then treats every microbatch like the microbatch of its capture. If this was the first microbatch, the graph quantizes
its weights each time, and each fused wgrad overwrites ``main_grad`` instead of being added. Otherwise, it never
quantizes its weights again. With the fix, `GroupedLinear` passes the skip flag in a capture, as `Linear` does, and sets
``is_first_microbatch`` to False if there is a flag. Captures by `torch.cuda.graph` outside TE still read no flag, as in
TE up to 2.16. The position of the argument depends on the version, so the patch finds it by the next argument.
"""

from ..fix import Fix

PATCH = """
@@ module/grouped_linear.py _GroupedLinear.forward
 (*ANY, skip_fp8_weight_update, save_original_input, *ANY) = non_tensor_args

@@ module/grouped_linear.py GroupedLinear.forward
-non_tensor_args = (..., None, self.save_original_input, ...)
+non_tensor_args = (..., skip_fp8_weight_update, self.save_original_input, ...)
@@ module/grouped_linear.py GroupedLinear.forward (at its start)
+from ..graph import is_graph_capturing
+
+skip_fp8_weight_update = None
+if is_graph_capturing() and FP8GlobalStateManager.fp8_graph_capturing():
+    from .._te_fp8_state_at_replay import global_state
+
+    skip_fp8_weight_update = global_state().skip_fp8_weight_update_tensor
+if skip_fp8_weight_update is None and is_first_microbatch is not None:
+    from .._te_first_microbatches import flag_of_capture
+
+    skip_fp8_weight_update = flag_of_capture(self, is_first_microbatch)
+if skip_fp8_weight_update is not None:
+    is_first_microbatch = False
+
"""

UPSTREAM = """
@@ module/grouped_linear.py GroupedLinear.forward (at least once)
 if FP8GlobalStateManager.fp8_graph_capturing():
     skip_fp8_weight_update = ANY_FLAG
 else:
     skip_fp8_weight_update = None
 if skip_fp8_weight_update is not None:
     is_first_microbatch = False
@@
 non_tensor_args = (..., cache_weight, skip_fp8_weight_update, self.save_original_input, ...)
@@ module/grouped_linear.py _GroupedLinear.forward
 (*ANY, cache_weight, skip_fp8_weight_update, *ANY) = non_tensor_args
@@
 ANY(..., skip_fp8_weight_update=skip_fp8_weight_update)
@@
 ANY(..., skip_update_flag=skip_fp8_weight_update)
@@ module/grouped_linear.py _GroupedLinear._forward_grouped_tensor
 ANY(..., skip_fp8_weight_update=skip_fp8_weight_update)
@@ module/grouped_linear.py _GroupedLinear._prepare_weights_for_grouped_tensor_gemm
 ANY(..., skip_update_flag=skip_fp8_weight_update)
"""

FIX = Fix(
    symptom="FP8 experts: outputs wrong after the first optimizer step (relative error 1.0), or wgrad norm ratio 0.577",
    group="gradients",
    affects="captured FP8 experts (te.GroupedLinear, --moe-grouped-gemm) with fp8_weight_caching (Megatron sets it)",
    merged="2.17",
    patch=PATCH,
    corrected=[(UPSTREAM, "GroupedLinear passes the skip flag on")],
    check_hints=("fp8 GroupedLinear output", "GroupedLinear backward main_grad"),
)
