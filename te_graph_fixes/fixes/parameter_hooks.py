"""``parameter-hooks``: hooks of parameters run in warmup and capture, and what they do becomes part of the graph.

Upstream: none yet, TE 2.10 to main.

Hooks run in warmup and capture, where gradients are uninitialised memory, and again after each replay, when the
gradients arrive at the parameters. A hook that adds to a sum counts each gradient twice; one that takes ``.grad`` away
is never called at replay, for its parameter seems to have no gradient. Hooks are now put aside for the backwards of
warmup and capture (`te_graph_fixes/shipped/parameter_hooks.py`). `torch.autograd.grad`, which TE called up to 2.11,
leaves out only the hooks of accumulation, and `te.checkpoint` within a graph refuses it.
"""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables
+from ._te_parameter_hooks import hooks_put_aside
 visited_te_modules = ANY_EMPTY
@@
-with ..., _none_grad_context_wrapper(inputs, ...):
+with hooks_put_aside(func), ..., _none_grad_context_wrapper(inputs, ...):
     ...
     torch.autograd.backward(...)
     ...
@@ (or)
-grad_inputs = torch.autograd.grad(
-    outputs=ANY_OUTPUTS,
-    inputs=tuple(i for i in static_input_surface if i.requires_grad),
-    grad_outputs=ANY_GRADS,
-    only_inputs=True,
-    allow_unused=allow_unused_input,
-)
+with hooks_put_aside(func):
+    grad_inputs = torch.autograd.grad(
+        outputs=ANY_OUTPUTS,
+        inputs=tuple(i for i in static_input_surface if i.requires_grad),
+        grad_outputs=ANY_GRADS,
+        only_inputs=True,
+        allow_unused=allow_unused_input,
+    )
@@ (2 times)
-with ..., _graph_context_wrapper(bwd_graph, ...):
+with hooks_put_aside(graph_callables[bwd_graphs.index(bwd_graph)]), ..., _graph_context_wrapper(bwd_graph, ...):
     ...
"""

FIX = Fix(
    symptom="gradient hooks also run during capture, so what they sum counts twice",
    group="gradients",
    affects="register_hook or register_post_accumulate_grad_hook on parameters of captured modules",
    patch=PATCH,
    provides=("parameter_hooks",),
)
