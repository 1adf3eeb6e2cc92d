"""Bug: hooks of parameters run in warmup and capture, and become part of the graph.

Upstream: none yet, TE 2.10 to main.

Hooks run in warmup and capture, where gradients are uninitialized memory, and again after each replay, when the
gradients arrive at the parameters. A hook that adds to a sum counts each gradient twice. A hook that sets ``.grad`` to
None is never called at a replay, because the capture then finds no gradient of its parameter. With the fix, the
backwards of warmup and capture run no hooks. TE up to 2.11 calls `torch.autograd.grad`, which skips only the hooks of
accumulation and does not support `te.checkpoint`."""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables
+from ._te_parameter_hooks import hooks_disabled
 visited_te_modules = ANY_EMPTY
@@
-with ..., _none_grad_context_wrapper(inputs, ...):
+with hooks_disabled(func), ..., _none_grad_context_wrapper(inputs, ...):
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
+with hooks_disabled(func):
+    grad_inputs = torch.autograd.grad(
+        outputs=ANY_OUTPUTS,
+        inputs=tuple(i for i in static_input_surface if i.requires_grad),
+        grad_outputs=ANY_GRADS,
+        only_inputs=True,
+        allow_unused=allow_unused_input,
+    )
@@ (2 times)
-with ..., _graph_context_wrapper(bwd_graph, ...):
+with hooks_disabled(graph_callables[bwd_graphs.index(bwd_graph)]), ..., _graph_context_wrapper(bwd_graph, ...):
     ...
"""

FIX = Fix(
    symptom="gradient hooks also run during capture, so their sums count gradients twice",
    group="gradients",
    affects="register_hook or register_post_accumulate_grad_hook on parameters of captured modules",
    patch=PATCH,
)
