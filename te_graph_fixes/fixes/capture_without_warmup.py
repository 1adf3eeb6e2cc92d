"""Bug: a capture for training with ``num_warmup_iters=0`` stops with KeyError.

Upstream: none yet, TE 2.10 to main

Forward hooks in the warmup show TransformerEngine (TE) which of its modules a callable runs. The backward of the warmup
shows which parameters get gradients. A backward graph needs both, and without a warmup TE knows neither. With the fix,
a capture for training runs at least one warmup iteration. A capture for evaluation runs as many iterations as its
caller requests, but at least one if a module or operation with delayed scaling has no scales yet. Otherwise the capture
would create these scales in graph memory, and each replay would reset them.
"""

from ..fix import Fix

PATCH = """
@@ graph.py make_graphed_callables
+def lacks_scales(m):
+    if isinstance(m, TransformerEngineBaseModule):
+        return not m.fp8_meta_tensors_initialized and bool(list(m.parameters(recurse=False)))
+    return isinstance(m, BasicOperation) and m._fp8_metas is None and m.num_quantizers("forward") > 0
+
+if isinstance(recipe, DelayedScaling) and any(lacks_scales(m) for module in modules for m in module.modules()):
+    # Scales that a capture creates would be reset by each replay.
+    num_warmup_iters = max(num_warmup_iters, 1)
 saved_fp8_tensors = save_fp8_tensors(...)

@@ graph.py _make_graphed_callables
+if is_training:
+    # A backward graph needs the modules and gradients found in a warmup.
+    num_warmup_iters = max(num_warmup_iters, 1)
 visited_te_modules = {}
@@
 for ANY_ITERATION in range(num_warmup_iters):
     ...
"""

FIX = Fix(
    symptom="a capture for training with num_warmup_iters=0 stops with KeyError",
    group="crashes",
    affects="callers of make_graphed_callables(num_warmup_iters=0)",
    cost="one warmup iteration in a capture for training with num_warmup_iters=0",
    patch=PATCH,
)
