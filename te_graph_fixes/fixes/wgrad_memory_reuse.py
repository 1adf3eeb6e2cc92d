"""``wgrad-memory-reuse``: where callables are captured together, a dgrad writes what another's delayed wgrad reads.

Upstream: none yet, TE 2.10 to main

The wgrad of each callable is captured right after its dgrad, and what it reads goes back to the pool, where the dgrad
of the callable before it takes it. Autograd replays all dgrads before ``backward_dw`` can be called. Wgrads are
captured after all dgrads now, in a pool of their own, so that they may be replayed in any order too.
"""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables
+wgrad_captures, wgrad_pool = [], graph_pool_handle()
 for static_input_surface, static_outputs, bwd_graph, bwd_dw_graph, bwd_idx in ANY_GRAPHS:
     ...
     if is_training:
         ...
-        if need_bwd_dw_graph[bwd_idx]:
+        def capture_wgrad(bwd_dw_graph=bwd_dw_graph, bwd_idx=bwd_idx, mempool=wgrad_pool):
             ...
+        if need_bwd_dw_graph[bwd_idx]: wgrad_captures.append(capture_wgrad)
     ...
+# Autograd replays the dgrads of all callables before a wgrad: none may write what a wgrad reads.
+for capture_wgrad in wgrad_captures:
+    capture_wgrad()
@@ (2 times)
 with ..., _graph_context_wrapper(bwd_dw_graph, ..., pool=mempool):
     ...
"""

FIX = Fix(
    symptom="delayed wgrads of several callables in one capture without _order: off by 1.0, or inf",
    group="pipelines and delayed wgrads",
    affects="own callers of make_graphed_callables((a, b), ...) without _order, with delay_wgrad_compute",
    cost="a memory pool of the wgrads' own",
    patch=PATCH,
    check_hints=("wgrad .grad",),
)
