"""Bug: in a capture of several callables, a dgrad overwrites inputs of another callable's wgrad.

Upstream: none yet, TE 2.10 to main

Without ``_order``, the wgrad of each callable is captured right after its dgrad. The memory of its inputs then returns
to the pool, and the dgrad of the previous callable reuses it. Autograd replays all dgrads before ``backward_dw`` can be
called. With the fix, wgrads are captured after all dgrads. The wgrads of several callables have a pool of their own, so
that they may be replayed in any order.
"""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables
+wgrad_captures = []
+wgrad_pool = graph_pool_handle() if len(callables) > 1 else mempool
 for static_input_surface, static_outputs, bwd_graph, bwd_dw_graph, bwd_idx in ANY_GRAPHS:
     ...
     if is_training:
         ...
-        if need_bwd_dw_graph[bwd_idx]:
+        def capture_wgrad(bwd_dw_graph=bwd_dw_graph, bwd_idx=bwd_idx, mempool=wgrad_pool):
             ...
+        if need_bwd_dw_graph[bwd_idx]: wgrad_captures.append(capture_wgrad)
     ...
+# Autograd replays the dgrads of all callables before a wgrad, so none may overwrite the inputs of a wgrad.
+for capture_wgrad in wgrad_captures:
+    capture_wgrad()
@@ (2 times)
 with ..., _graph_context_wrapper(bwd_dw_graph, ..., pool=mempool):
     ...
"""

FIX = Fix(
    symptom="delayed wgrads of several callables in one capture without _order are wrong (relative error 1.0, or inf)",
    group="pipelines and delayed wgrads",
    affects="programs that call make_graphed_callables((a, b), ...) without _order, with delay_wgrad_compute",
    cost="a second memory pool, for the wgrads of several callables",
    patch=PATCH,
    after=("delayed-wgrad-delivery",),
    check_hints=("wgrad .grad",),
)
