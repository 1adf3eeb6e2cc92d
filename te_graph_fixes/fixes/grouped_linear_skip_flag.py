"""``grouped-linear-skip-flag``: under graphs, FP8 experts ignore the flag that says when weights are new.

Upstream: https://github.com/NVIDIA/TransformerEngine/pull/3051,
https://github.com/NVIDIA/TransformerEngine/pull/3052,
https://github.com/NVIDIA/TransformerEngine/pull/3065 (TE 2.17)

Symptom: with FP8 weight caching, outputs of a graphed `GroupedLinear` are off by about 1.0 after the first optimizer
step (its weights are never quantized again), or its weights are quantized at every microbatch and its wgrad is
overwritten (x0.577 for three microbatches).

`GroupedLinear.forward` hands a literal ``None`` to `_GroupedLinear` in the slot ``skip_fp8_weight_update``. It becomes
what `Linear` does: under capture read the graph's skip tensor and, where there is one, pass it on and force
``is_first_microbatch=False``; but not in captures by `torch.cuda.graph`, which the flag is not about.
The slot differs by version (16, 18 or 19), so it is found by its name.
"""

from ..fix import Fix
from ..patching.patch import SemanticPatch
from ..patching.source import Source

PATCH = """
@@ module/grouped_linear.py _GroupedLinear.forward
 (*ANY, skip_fp8_weight_update, save_original_input, debug) = non_tensor_args
@@ (or)
 (*ANY, skip_fp8_weight_update, save_original_input) = non_tensor_args

@@ module/grouped_linear.py GroupedLinear.forward
 non_tensor_args = (
     ...,
-    None,
+    skip_fp8_weight_update,
     self.save_original_input,
     debug,
 )
@@ (or)
 non_tensor_args = (
     ...,
-    None,
+    skip_fp8_weight_update,
     self.save_original_input,
 )
@@ module/grouped_linear.py GroupedLinear.forward (at its start)
+from ..graph import is_graph_capturing
+
+skip_fp8_weight_update = None
+if is_graph_capturing() and FP8GlobalStateManager.fp8_graph_capturing():
+    skip_fp8_weight_update = FLAG
+    if skip_fp8_weight_update is not None:
+        is_first_microbatch = False
+    elif is_first_microbatch is False:
+        from .._te_first_microbatches import flag_of_capture
+
+        skip_fp8_weight_update = flag_of_capture()
+
"""

UPSTREAM = """
@@ module/grouped_linear.py GroupedLinear.forward ({reads} times)
 if FP8GlobalStateManager.fp8_graph_capturing():
     skip_fp8_weight_update = {flag}
 else:
     skip_fp8_weight_update = None
 if skip_fp8_weight_update is not None:
     is_first_microbatch = False
@@ ({assignments} times)
 skip_fp8_weight_update = ANY
@@
 non_tensor_args = (..., cache_weight, skip_fp8_weight_update, self.save_original_input, ...)
@@ module/grouped_linear.py _GroupedLinear.forward
 (*ANY, cache_weight, skip_fp8_weight_update, *ANY) = non_tensor_args
@@
 ANY(..., skip_fp8_weight_update=skip_fp8_weight_update)
@@
 ANY(..., skip_update_flag=skip_fp8_weight_update)
@@
 ANY(..., skip_update_flag=ANY)
@@ module/grouped_linear.py _GroupedLinear._forward_grouped_tensor
 ANY(..., skip_fp8_weight_update=skip_fp8_weight_update)
@@ module/grouped_linear.py _GroupedLinear._prepare_weights_for_grouped_tensor_gemm
 ANY(..., skip_update_flag=skip_fp8_weight_update)
@@
 ANY(..., skip_update_flag=ANY)
"""
FLAGS = (
    "FP8GlobalStateManager.get_skip_fp8_weight_update_tensor()",
    "FP8GlobalStateManager.quantization_state.skip_fp8_weight_update_tensor",
)
"""How TE reads the graph's skip tensor, up to 2.14 and from 2.15 on."""


def _skip_tensor(source: Source) -> str:
    """How this TE reads the graph's skip tensor."""
    quantization = source.module("transformer_engine.pytorch.quantization")
    if quantization.find("FP8GlobalStateManager.get_skip_fp8_weight_update_tensor"):
        return FLAGS[0]
    quantization.definition("FP8GlobalState").one("skip_fp8_weight_update_tensor: ANY_TYPE = None")
    return FLAGS[1]


FIX = Fix(
    symptom="FP8 experts: outputs off by 1.0 after the first optimizer step, or wgrads at 0.577 of their norm",
    group="gradients",
    users="fp8_weight_caching with captured FP8 experts (te.GroupedLinear, Megatron-Core moe_grouped_gemm)",
    affected=">=2.10,<2.17",
    examine=SemanticPatch(
        PATCH,
        "GroupedLinear passes None as skip_fp8_weight_update",
        names={"FLAG": _skip_tensor},
        provides=("first_microbatches",),
        corrected=[
            (UPSTREAM.format(reads=reads, assignments=2 * reads, flag=flag), "GroupedLinear passes the skip flag on")
            for reads in (1, 2)
            for flag in FLAGS
        ],
    ),
    check_hints=("fp8 GroupedLinear output", "GroupedLinear backward main_grad"),
)
