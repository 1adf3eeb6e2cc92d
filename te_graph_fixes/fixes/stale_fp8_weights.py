"""``stale-fp8-weights``: graphs go on with the FP8 weights of their capture.

Upstream: open, TE 2.10 to main; https://github.com/NVIDIA/TransformerEngine/pull/3298 is about the second case.

Symptom: after an optimizer step the outputs of graphed FP8 modules are off by about 1.0, because weights are not
quantized again.

It happens

1. to modules that carry ``is_first_microbatch``, as Megatron-Core's do, where the capture does not cache weights
   (``cache_quantized_params=False``; so does Megatron-Core 0.14.0 where attention is not captured). Warmup leaves False
   behind, and without the graph's skip flag False means that weights are never quantized. It now means what it means
   for wgrads: quantize, and accumulate. Before TE 2.14 it needs `warmup-reset` to show;
2. to a capture that does not cache weights, after one that does: it reads the skip flag of the other;
3. where another FP8 module runs before the graph in the same autocast: the graph does not set the skip flag, which
   still has the value of another graph or microbatch. Every graph that caches weights sets it now.
"""

from __future__ import annotations

from ..fix import Fix
from ..patch import SemanticPatch
from ..shapes import MODULES, skip_flag_state

GRAPH = """
@@ graph.py is_graph_capturing
 return ANY
@@ graph.py _make_graphed_callables
+@contextlib.contextmanager
+def own_skip_flag():
+    # Captures that cache weights share one skip flag. Hide it from those that do not.
+    state = STATE
+    skip_flag = state.skip_fp8_weight_update_tensor
+    if not cache_quantized_params:
+        state.skip_fp8_weight_update_tensor = None
+    try:
+        yield
+    finally:
+        state.skip_fp8_weight_update_tensor = skip_flag
+
 visited_te_modules = ANY_EMPTY
@@
-with torch.cuda.stream(torch.cuda.Stream()):
+with own_skip_flag(), torch.cuda.stream(torch.cuda.Stream()):
     ...
@@ (2 times)
-with ..., _graph_context_wrapper(fwd_graph, pool=mempool):
+with own_skip_flag(), ..., _graph_context_wrapper(fwd_graph, pool=mempool):
     ...
@@ (2 times)
-with ..., _graph_context_wrapper(bwd_graph, pool=mempool):
+with own_skip_flag(), ..., _graph_context_wrapper(bwd_graph, pool=mempool):
     ...
@@
-ctx.is_first_module and skip_fp8_weight_update is not None
+isinstance(skip_fp8_weight_update, bool)
"""

LAYER = """
@@ module/FILE.py CLASS.forward
+if is_first_microbatch is False:
+    from ..graph import is_graph_capturing as is_capturing
+
+    # Captured without a skip flag, "not the first microbatch" would mean that weights are never quantized.
+    if is_capturing() and STATE.skip_fp8_weight_update_tensor is None:
+        is_first_microbatch = None
+
 ANY_FLAG = torch.is_grad_enabled()
"""
PATCH = GRAPH + "".join(LAYER.replace("FILE", file).replace("CLASS", name) for file, name in MODULES.items())


FIX = Fix(
    id="stale-fp8-weights",
    summary="graphs go on with the FP8 weights of their capture",
    symptom="FP8 without cached weights: graphs go on with the weights of their capture, outputs off by 1.0",
    group="FP8 state",
    users="FP8 graphs without fp8_weight_caching, and graphs behind another FP8 module in one autocast",
    upstream=("https://github.com/NVIDIA/TransformerEngine/pull/3298",),
    affected=">=2.10",
    examine=SemanticPatch(
        PATCH,
        "graphs without a skip flag of their own never quantize their weights again",
        names={"STATE": skip_flag_state},
    ),
    check_hints=("fp8 output", "fp8 gradient"),
)
