"""Bug: a capture with cached weights under ``torch.inference_mode()`` breaks all later captures.

Upstream: none yet

The first capture with ``cache_quantized_params=True`` creates the skip flag, one tensor that all such graphs share.
Under ``torch.inference_mode()``, the flag becomes an inference tensor. PyTorch refuses to fill this tensor outside of
inference mode. Every later capture or replay with cached weights therefore raises an error, also for other modules and
in bf16. With the fix, the flag is created outside of inference mode.
"""

from ..fix import Fix

PATCH = """
@@ quantization.py FP8GlobalStateManager
-ANY_STATE.skip_fp8_weight_update_tensor = torch.empty(1, dtype=torch.float32, device="cuda")
+with torch.inference_mode(False):
+    ANY_STATE.skip_fp8_weight_update_tensor = torch.empty(1, dtype=torch.float32, device="cuda")
@@ graph.py _make_graphed_callables (or)
-ANY_STATE.skip_fp8_weight_update_tensor = torch.empty(1, dtype=torch.float32, device="cuda")
+with torch.inference_mode(False):
+    ANY_STATE.skip_fp8_weight_update_tensor = torch.empty(1, dtype=torch.float32, device="cuda")
"""

FIX = Fix(
    symptom="after a capture under torch.inference_mode(), later captures raise 'Inplace update to inference tensor'",
    group="crashes",
    affects="cached FP8 weights (fp8_weight_caching) if the first capture runs under torch.inference_mode()",
    patch=PATCH,
)
