"""Bug: gradients that a replayed ``backward_dw`` computes do not reach the parameters.

Upstream: none yet

With ``delay_wgrad_compute``, `backward_dw` assigns the gradients of biases, and of weights without a fused wgrad, to
``.grad`` in Python. A replay does not repeat these assignments. With the fix, the capture records the gradients, and
each replay assigns copies of them before the hooks run. As in an eager `backward_dw`, a weight's ``.grad`` is replaced,
and a bias's ``.grad`` is set only if it is None. (If one tensor contains the biases of all experts, the gradient is
added to its ``.grad``.) Warmup and capture do not change ``.grad``. The fix also records modules whose ``forward`` is
called directly, although TE's hooks do not see them. In a capture, GroupedLinear no longer returns the buffers of its
delayed wgrads, because no wgrad has filled them yet. Eager training does not change.
"""

from ..fix import Fix
from .shapes import REPLAY_STEPS

PATCH = """
@@ graph.py _make_graphed_callables
 need_bwd_dw_graph = {}
+
+from ._te_delayed_wgrad_delivery import delivery, record_backward_dw, visit_waiting
@@
+visit_waiting(visited_te_modules, func_idx, func)
 for module in visited_te_modules.get(func_idx, set()):
     if hasattr(module, "need_backward_dw") and module.need_backward_dw():
         need_backward_dw = True
-        module.backward_dw()
+        record_backward_dw(module, per_callable_module_params[func_idx])
@@ (2 times)
+delayed_grads = []
 with ..., _graph_context_wrapper(bwd_dw_graph, ...):
     for module in visited_te_modules[ANY_INDEX]:
         if hasattr(module, "need_backward_dw") and module.need_backward_dw():
-            module.backward_dw()
+            delayed_grads += record_backward_dw(module, per_callable_module_params[ANY_INDEX])
@@ (2 times)
 with ..., _graph_context_wrapper(bwd_dw_graph, ...):
     for module in visited_te_modules[ANY_INDEX]:
         ...
+replays[ANY_INDEX].add("wgrad deliver", "assign gradients", delivery(delayed_grads))
@@ (3 times)
 module.backward_dw()

@@ graph.py _make_graphed_callables
+from ._te_delayed_wgrad_delivery import delayed_biases
+
+# The dgrad may return grads of these parameters, although their module delays its wgrads.
+static_delayed_biases = delayed_biases(callables)
+
 def _returned_param_grad_clone_slots(...): ...
@@ (or, 0 times)
 def _returned_param_grad_clone_slots(...): ...
@@ graph.py _make_graphed_callables._returned_param_grad_clone_slots (if there)
-getattr(module_params[idx - module_param_start], "skip_backward_post_hook", ANY)
+(
+    getattr(module_params[idx - module_param_start], "skip_backward_post_hook", False)
+    and id(module_params[idx - module_param_start]) not in static_delayed_biases
+)

@@ graph.py _make_graphed_callables
 if is_training:
     ...
     with ..., _none_grad_context_wrapper(inputs, ...):
         outputs_requiring_grad = tuple(ANY)
         ...
     ...
 else:
     ...
 del outputs, grad_inputs
+# The last outputs of warmup keep AccumulateGrad nodes of its stream alive. A capture cannot wait for that stream.
+outputs_requiring_grad = None
@@ (or, at least once)
 tuple(o for o in outputs if o.requires_grad)
@@ (or, 0 times)
 del outputs, grad_inputs

@@ module/grouped_linear.py _GroupedLinear.backward (at its start)
+from ..graph import is_graph_capturing
@@ module/grouped_linear.py _GroupedLinear._backward_grouped_tensor (if there, at its start)
+from ..graph import is_graph_capturing
@@ module/grouped_linear.py _GroupedLinear (at least once)
 if ctx.fuse_wgrad_accumulation and hasattr(weight, "grad_added_to_main_grad"):
     ...
-elif ctx.fuse_wgrad_accumulation:
+elif ctx.fuse_wgrad_accumulation or (
+    ctx.wgrad_store is not None and ctx.wgrad_store.delay_wgrad_compute() and is_graph_capturing()
+):
     wgrad = None
"""

# The operation `te.ops.GroupedLinear` has hooks from TE 2.15 on.
HOOKS_OF_OPERATIONS = """
@@ graph.py _make_graphed_callables.make_graphed_attribute_functions.backward_dw
-isinstance(module, TransformerEngineBaseModule)
+hasattr(module, "_trigger_wgrad_accumulation_and_reduce_hooks")
@@ (or, 0 times)
 isinstance(module, TransformerEngineBaseModule)
"""

FIX = Fix(
    symptom="delayed wgrads: gradients of biases and unfused weights never reach .grad, are wrong, or raise an error",
    group="pipelines and delayed wgrads",
    affects="Megatron --delay-wgrad-compute (delay_wgrad_compute) with biases, or with unfused wgrads",
    cost="a copy of each gradient that a wgrad graph computes for .grad, after its replay",
    patch=REPLAY_STEPS + PATCH + HOOKS_OF_OPERATIONS,
    requires=("backward-dw-hooks", "param-grad-lifetime", "wgrad-without-dgrad"),
    check_hints=("wgrad .grad",),
)
