"""``recompute-in-graphs``: where a graph recomputes activations, its replays miss updates of FP8 scales.

Upstream: none yet, TE 2.10 to main

A recomputation has an autocast of its own: its end updates the scales of the forward, its first module those of the
backward. The first update is captured with the modules that happen to be registered then, so that a capture after an
evaluation updates the scales of all other modules. The second is left to the graph that is the first of an autocast:
after a module without a backward, or in an autocast inside another that is off, it is never done. Both are now left out
of warmup and capture, and done after each replay of such a backward, which gets the skip flag of its own forward:
another graph's first microbatch in between would have weights quantized again. Other captures than TE's own, as those
of `torch.cuda.graph` or Megatron-Core, keep the update: nothing else does it at their replays.
"""

from ..fix import Fix
from .shapes import skip_flag_state

PATCH = """
@@ quantization.py FP8GlobalStateManager.autocast_exit
+if hasattr(cls, "recompute_asked_for_update"):
+    # A recomputation in a graph: each replay of its backward will do it.
+    cls.recompute_asked_for_update = True
+    return
 cls.reduce_and_update_fp8_tensors(forward=True)

@@ graph.py _make_graphed_callables
+flag_of_graphs = STATE.skip_fp8_weight_update_tensor
+@contextlib.contextmanager
+def updates_left_out(bwd_graph=None):
+    FP8GlobalStateManager.recompute_asked_for_update = False
+    try:
+        yield
+        # `autocast_exit` has set it while this graph was captured.
+        if bwd_graph is not None:
+            bwd_graph.recomputes = FP8GlobalStateManager.recompute_asked_for_update
+    finally:
+        del FP8GlobalStateManager.recompute_asked_for_update
+
 visited_te_modules = ANY_EMPTY
@@
-with ..., torch.cuda.stream(ANY):
+with updates_left_out(), ..., torch.cuda.stream(ANY):
     ...
@@ (2 times)
-with ..., _graph_context_wrapper(bwd_graph, ...):
+with updates_left_out(bwd_graph), ..., _graph_context_wrapper(bwd_graph, ...):
     ...

@@ graph.py _make_graphed_callables.Graphed.forward (at its start)
+ctx.skips_update = skip_fp8_weight_update

@@ graph.py _make_graphed_callables.Graphed.backward (at its start)
+recomputes = getattr(bwd_graph, "recomputes", False)
+if recomputes and isinstance(ctx.skips_update, bool):
+    # Another graph may have set the flag since the forward.
+    flag_of_graphs.fill_(ctx.skips_update)
@@ graph.py _make_graphed_callables.Graphed.backward
+if recomputes:
+    FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)
-if ctx.is_first_module:
+if ctx.is_first_module or recomputes:
     FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
"""

FIX = Fix(
    symptom="te.checkpoint inside a graph, delayed scaling: some FP8 scales are never updated",
    group="FP8 state",
    affects="DelayedScaling (Megatron --fp8-recipe delayed) and te.checkpoint in captured modules (--recompute-modules)",
    patch=PATCH,
    names={"STATE": skip_flag_state},
    check_hints=("fp8 gradient",),
)
