"""Patterns that more than one fix looks for in the graph code of TransformerEngine (TE)."""

from __future__ import annotations

from .patching.source import Source


def global_state(source: Source, field: str, earlier: str) -> str:
    """Return the code that reads a field of TE's global FP8 state; up to 2.14, the manager's attribute ``earlier``."""
    quantization = source.module("transformer_engine.pytorch.quantization")
    manager = quantization.definition("FP8GlobalStateManager")
    if manager.has("quantization_state = FP8GlobalState()"):
        quantization.definition("FP8GlobalState").one(f"{field}: ANY_TYPE = ANY")
        return f"FP8GlobalStateManager.quantization_state.{field}"
    manager.one(f"{earlier} = ANY")
    return f"FP8GlobalStateManager.{earlier}"


def skip_flag_state(source: Source) -> str:
    """Return the code that reads the owner of the skip flag."""
    flag = "skip_fp8_weight_update_tensor"
    return global_state(source, flag, flag).removesuffix(f".{flag}")


SHARED_DUMMIES = """
@@ module/layernorm_mlp.py _LayerNormMLP.backward (at its start)
+from .base import get_dummy_wgrad
@@ module/layernorm_mlp.py _LayerNormMLP.backward (2 times)
-torch.empty(ANY_SHAPE, dtype=ANY_DTYPE, device=torch.cuda.current_device(), requires_grad=False)
+(
+    get_dummy_wgrad(list(ANY_SHAPE), ANY_DTYPE)
+    if is_graph_capturing()
+    else torch.empty(ANY_SHAPE, dtype=ANY_DTYPE, device=torch.cuda.current_device(), requires_grad=False)
+)
"""
"""In a capture, `LayerNormMLP` returns TE's shared dummies for wgrads in ``main_grad``, as all other modules do.

Its own dummies are in graph memory.
"""
