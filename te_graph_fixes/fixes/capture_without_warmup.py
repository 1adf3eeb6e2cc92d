"""Bug: a capture for training with ``num_warmup_iters=0`` stops with KeyError.

Upstream: none yet, TE 2.10 to main

Forward hooks in the warmup show TransformerEngine (TE) which of its modules a callable runs. The backward of the warmup
shows which parameters get gradients. A backward graph needs both, and without a warmup TE knows neither. With the fix,
a capture for training runs at least one warmup iteration. An iteration that the caller does not request changes no
buffer, FP8 state or random state, and no tensor in an attribute or container of a module. A capture for evaluation runs
as many iterations as its caller requests, but at least one if it would otherwise create cached FP8 weights or FP8
scales in graph memory, because each replay would quantize these weights again, or reset these scales.
"""

from ..fix import Fix

PATCH = """
@@ graph.py make_graphed_callables
+def lacks_scales(m):
+    if isinstance(m, TransformerEngineBaseModule):
+        # Attention in FP8 has no parameters, but it has delayed scales even if the recipe is not delayed scaling.
+        has_scales = is_delayed if list(m.parameters(recurse=False)) else attention_in_fp8
+        fp8_meta = m.fp8_meta
+    else:
+        has_scales = is_delayed and isinstance(m, BasicOperation) and m.num_quantizers("forward") > 0
+        fp8_meta = m._fp8_metas["forward"] if has_scales and m._fp8_metas else {}
+    return has_scales and getattr(fp8_meta.get("scaling_fwd"), "amax_history", None) is None
+
+is_delayed = isinstance(recipe, DelayedScaling)
+attention_in_fp8 = getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False)
+if not num_warmup_iters and (
+    cache_quantized_params
+    or any(hasattr(m, "is_first_microbatch") or lacks_scales(m) for module in modules for m in module.modules())
+):
+    # A capture must not create scales or cached weights, because each replay would reset or quantize them again.
+    num_warmup_iters = True
 saved_fp8_tensors = save_fp8_tensors(...)

@@ graph.py _make_graphed_callables
+from ._te_capture_without_warmup import preserve_buffers
+
+if is_training:
+    # A backward graph needs the modules and gradients found in a warmup.
+    num_warmup_iters = num_warmup_iters or True
+# True marks one iteration that the caller did not request, and that must leave no trace.
+preserved_buffers = preserve_buffers(callables if num_warmup_iters is True else ())
 visited_te_modules = {}
@@
-with ..., torch.cuda.stream(ANY):
+with ..., torch.cuda.stream(ANY), preserved_buffers:
     ...
"""

FIX = Fix(
    symptom="a capture for training with num_warmup_iters=0 stops with KeyError",
    group="crashes",
    affects="callers of make_graphed_callables(num_warmup_iters=0)",
    cost="one warmup iteration in a capture with num_warmup_iters=0, for evaluation only if its modules need one",
    after=("nested-autocast",),
    patch=PATCH,
)
