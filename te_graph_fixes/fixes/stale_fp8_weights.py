"""Bug: a graph keeps using the FP8 weights of its capture.

Upstream: none yet, TE 2.10 to main; https://github.com/NVIDIA/TransformerEngine/pull/3298 is about the second case.

This happens in three cases:

1. Modules have the attribute ``is_first_microbatch``, as in Megatron-Core, and the capture does not cache weights
   (``cache_quantized_params=False``, as in Megatron-Core 0.14.0 if attention is not captured). The warmup sets the
   attribute to False. Without a skip flag, a module called with False never quantizes its weights. With the fix, such a
   graph reads a flag for each module with the attribute. The flags are filled from the attributes before each replay
   (`te_graph_fixes/support/first_microbatches.py`). If a module is called with False every time, its graph reuses the
   weights of an earlier call, as the module does.
2. A capture that does not cache weights follows a capture that does, and reads the skip flag of that capture.
3. Another FP8 module runs before the graph in the same autocast. The graph then does not fill the skip flag, which
   still has the value for another graph or microbatch. With the fix, a graph that caches weights fills the flag
   whenever the flag has another value.
"""

from ..fix import Fix
from .shapes import REPLAY_STEPS, SKIP_FLAG

GRAPH = """
@@ graph.py _make_graphed_callables
+from ._te_first_microbatches import FirstMicrobatches, needs_fill, note_fill
+
+microbatches = FirstMicrobatches(callables, cache_quantized_params)
 visited_te_modules = ANY_EMPTY
@@
-with ..., torch.cuda.stream(ANY):
+with microbatches.during_warmup(), ..., torch.cuda.stream(ANY):
     ...
@@ (2 times)
-with ..., _graph_context_wrapper(fwd_graph, ...):
+with microbatches.during_forward(replays.of(fwd_graph), func), ..., _graph_context_wrapper(fwd_graph, ...):
     ...
@@ (2 times)
-with ..., _graph_context_wrapper(bwd_graph, ...):
+with microbatches.during_backward(replays.of(bwd_graph)), ..., _graph_context_wrapper(bwd_graph, ...):
     ...
@@
+microbatches.restore()
 ret = []
@@ graph.py _make_graphed_callables.Graphed.forward
-if ctx.is_first_module and skip_fp8_weight_update is not None:
+if skip_fp8_weight_update is not None and (ctx.is_first_module or needs_fill(skip_fp8_weight_update)):
     ANY_FILL
+    note_fill(skip_fp8_weight_update)
"""

LAYER = """
@@ module/FILE.py CLASS.forward (at least once)
 if FP8GlobalStateManager.fp8_graph_capturing():
     skip_fp8_weight_update = ANY_FLAG
 else:
     skip_fp8_weight_update = None
+if skip_fp8_weight_update is None and is_first_microbatch is not None:
+    from .._te_first_microbatches import flag_of_capture
+
+    skip_fp8_weight_update = flag_of_capture(self, is_first_microbatch)
"""
EARLIER_EXPERTS = """
@@ (or)
 non_tensor_args = (..., None, self.save_original_input, ...)
"""
"""An alternative to the last hunk of `LAYERS`. Up to TE 2.16, `grouped-linear-skip-flag` adds the flag of experts."""
LAYERS = "".join(
    LAYER.replace("FILE", file).replace("CLASS", name)
    for file, name in (
        ("linear", "Linear"),
        ("layernorm_linear", "LayerNormLinear"),
        ("layernorm_mlp", "LayerNormMLP"),
        ("grouped_linear", "GroupedLinear"),
    )
)
PATCH = GRAPH + LAYERS + EARLIER_EXPERTS


FIX = Fix(
    symptom="FP8 without cached weights: graphs use the weights of their capture, outputs have a relative error of 1.0",
    group="FP8 state",
    affects="FP8 graphs without cached weights (Megatron-Core 0.14.0), or after another FP8 module in their autocast",
    patch=REPLAY_STEPS + SKIP_FLAG + PATCH,
    requires=("grouped-linear-skip-flag",),
    check_hints=("fp8 output", "fp8 gradient"),
)
