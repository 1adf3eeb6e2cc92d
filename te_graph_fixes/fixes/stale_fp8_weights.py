"""``stale-fp8-weights``: graphs go on with the FP8 weights of their capture.

Upstream: none yet, TE 2.10 to main; https://github.com/NVIDIA/TransformerEngine/pull/3298 is about the second case.

It happens

1. to modules that carry ``is_first_microbatch``, as Megatron-Core's do, where the capture does not cache weights
   (``cache_quantized_params=False``; so does Megatron-Core 0.14.0 where attention is not captured). Warmup leaves
   False, and without a skip flag False means that weights are never quantized. Such a graph now has a flag of its own,
   which says before each replay what its modules say eagerly (`te_graph_fixes/shipped/first_microbatches.py`);
2. to a capture that does not cache weights, after one that does: it reads the skip flag of the other;
3. where another FP8 module runs before the graph in the same autocast: the graph does not set the skip flag, which
   still has the value of another graph or microbatch. Every graph that caches weights sets it now.
"""

from ..fix import Fix
from .shapes import skip_flag_state

GRAPH = """
@@ graph.py _make_graphed_callables
+from ._te_first_microbatches import Marks
+
+@contextlib.contextmanager
+def own_skip_flag(marks=None):
+    # Captures that cache weights share one skip flag. Hide it from those that do not; their graphs have one each.
+    state = STATE
+    skip_flag = state.skip_fp8_weight_update_tensor
+    if not cache_quantized_params:
+        state.skip_fp8_weight_update_tensor = None
+        Marks.of_capture = marks
+    try:
+        yield
+    finally:
+        state.skip_fp8_weight_update_tensor = skip_flag
+        Marks.of_capture = None
+
+flags = iter(torch.zeros(len(flatten_sample_args) + 1, device="cuda").split(1))
 visited_te_modules = ANY_EMPTY
@@
-with ..., torch.cuda.stream(ANY):
+with own_skip_flag(Marks(next(flags))), ..., torch.cuda.stream(ANY):
     ...
@@ (2 times)
+fwd_graph.marks = Marks(next(flags), func)
-with ..., _graph_context_wrapper(fwd_graph, ...):
+with own_skip_flag(fwd_graph.marks), ..., _graph_context_wrapper(fwd_graph, ...):
     ...
@@ (2 times)
-with ..., _graph_context_wrapper(bwd_graph, ...):
+with own_skip_flag(), ..., _graph_context_wrapper(bwd_graph, ...):
     ...
@@ graph.py _make_graphed_callables.Graphed.forward
-if ctx.is_first_module and skip_fp8_weight_update is not None:
+if isinstance(skip_fp8_weight_update, bool):
     ...
+if fwd_graph.marks.are_read:
+    skip_fp8_weight_update = fwd_graph.marks.take()
@@ graph.py make_graphed_callables
+marked = [m for module in modules for m in module.modules() if hasattr(m, "is_first_microbatch")]
+marks = [m.is_first_microbatch for m in marked]
 saved_fp8_tensors = save_fp8_tensors(...)
@@
 restore_fp8_tensors(modules, saved_fp8_tensors, ...)
+for m, mark in zip(marked, marks):
+    m.is_first_microbatch = mark
"""

LAYER = """
@@ module/FILE.py CLASS.forward (at least once)
 if skip_fp8_weight_update is not None:
     is_first_microbatch = False
+if is_first_microbatch is False and skip_fp8_weight_update is None:
+    # Captured without a skip flag, "not the first microbatch" would mean that weights are never quantized.
+    from .._te_first_microbatches import flag_of_capture
+
+    skip_fp8_weight_update = flag_of_capture()
"""
EARLIER_EXPERTS = """
@@ (or)
 non_tensor_args = (..., None, self.save_original_input, ...)
"""
"""The other shape of the last hunk of `LAYERS`, of experts: up to 2.16 `grouped-linear-skip-flag` gives their flag."""
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
    symptom="FP8 without cached weights: graphs go on with the weights of their capture, outputs off by 1.0",
    group="FP8 state",
    affects="FP8 graphs without cached weights (Megatron-Core 0.14.0), or after another FP8 module in one autocast",
    patch=PATCH,
    names={"STATE": skip_flag_state},
    provides=("first_microbatches",),
    requires=("grouped-linear-skip-flag",),
    check_hints=("fp8 output", "fp8 gradient"),
)
