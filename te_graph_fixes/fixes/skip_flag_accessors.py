"""Bug: Megatron-Core's own graphs call a setter that TE 2.15 and 2.16 lack.

Upstream: https://github.com/NVIDIA/TransformerEngine/pull/3015 (TE 2.17), reported as
https://github.com/NVIDIA/Megatron-LM/issues/4707

TE 2.15 moved the skip flag from `FP8GlobalStateManager` to its attribute ``quantization_state``, and removed the
accessors of the flag. The fix adds accessors that read and write the flag at its new place. Graphs that TE captures for
Megatron-Core do not need these accessors.
"""

from ..fix import Fix

PATCH = """
@@ quantization.py FP8GlobalStateManager
 quantization_state = FP8GlobalState()
@@ (0 times)
 def get_skip_fp8_weight_update_tensor(...):
     ...
@@ (0 times)
 def set_skip_fp8_weight_update_tensor(...):
     ...
@@ quantization.py FP8GlobalState
 skip_fp8_weight_update_tensor: ANY_TYPE = None

@@ quantization.py FP8GlobalStateManager
 def reset(...):
     ...
+
+@classmethod
+def set_skip_fp8_weight_update_tensor(cls, skip):
+    \"\"\"Set, in place, the flag that makes graphs keep the quantized weights (True) or renew them (False).\"\"\"
+    state = cls.quantization_state
+    if state.skip_fp8_weight_update_tensor is None:
+        with torch.inference_mode(False):
+            state.skip_fp8_weight_update_tensor = torch.empty(1, dtype=torch.float32, device="cuda")
+    state.skip_fp8_weight_update_tensor.fill_(skip)
+
+@classmethod
+def get_skip_fp8_weight_update_tensor(cls):
+    \"\"\"The flag tensor of shape [1], or None before the first capture with weight caching.\"\"\"
+    return cls.quantization_state.skip_fp8_weight_update_tensor
"""

UPSTREAM = """
@@ quantization.py FP8GlobalStateManager.get_skip_fp8_weight_update_tensor
 return ANY_STATE.skip_fp8_weight_update_tensor
@@ quantization.py FP8GlobalStateManager.set_skip_fp8_weight_update_tensor
 ANY_STATE.skip_fp8_weight_update_tensor.fill_(skip)
"""

FIX = Fix(
    symptom="Megatron-Core 0.11 to 0.17 with its own graphs stops: no attribute 'set_skip_fp8_weight_update_tensor'",
    group="crashes",
    affects="Megatron-Core 0.11.0 to 0.17.1 with its own graphs (--cuda-graph-impl local) in FP8",
    since="2.15",
    merged="2.17",
    patch=PATCH,
    corrected=[(UPSTREAM, "FP8GlobalStateManager has both accessors")],
)
