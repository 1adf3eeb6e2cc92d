"""``delayed-wgrad-delivery``: gradients that a replayed ``backward_dw`` computes do not reach the parameters.

Upstream: none yet

Symptom, with ``delay_wgrad_compute``: under graphs the gradients of biases, and of weights whose wgrad is not fused
into ``main_grad``, are missing (error 1.0), or garbage; captures fail with ``'NoneType' object has no attribute 'to'``
or ``attempting to assign a gradient of size '[0]'``. Eagerly, only one microbatch's gradient arrives.

`backward_dw` assigns to ``.grad`` in Python, which a replay does not repeat, and it assigns instead of adding. It now
adds, and takes for a bias gradient only what the wgrad GEMM has computed. Gradients that it gives to parameters in a
capture are added to their ``.grad`` after each replay, before the hooks; warmup and capture leave ``.grad`` as it was
(`te_graph_fixes/shipped/delayed_wgrad.py`, shipped beside the patched modules). This holds for modules whose
``forward`` is called directly, too. GroupedLinear no longer returns buffers that its delayed wgrad has yet to fill.

In FP8 the dgrad computes the bias gradients. Without ``param-grad-lifetime``, which has them copied, what crashed or
was lost would be wrong without a sign (measured on TE 2.15.0: 1.02), so the two go together.
"""

from ...fix import Fix, Verdict, applicable
from ...patching.patch import PYTORCH, edits
from ...patching.source import Definition, Source
from ...shipped import new_module
from ..shapes import graph_capture
from .backward_dw import MODULES, OPERATION, require_all_replaced

# `replay()` stands in the place of itself: what `backward-dw-hooks` inserts below it comes behind the delivery.
PATCH = """
@@ graph.py _make_graphed_callables
 need_bwd_dw_graph = {}
+
+from ._te_delayed_wgrad import deliver_grads, take_grads, visit_waiting
+
+# For each wgrad graph, what its replay leaves in the graph's memory: (parameter, gradient).
+static_delayed_grads = {}
@@
+visit_waiting(visited_te_modules, func_idx, func)
 for module in visited_te_modules.get(func_idx, set()):
     if hasattr(module, "need_backward_dw") and module.need_backward_dw():
         need_backward_dw = True
-        module.backward_dw()
+        take_grads(module)
@@ (2 times)
 with _graph_context_wrapper(bwd_dw_graph, ...):
     for module in visited_te_modules[ANY_INDEX]:
         if hasattr(module, "need_backward_dw") and module.need_backward_dw():
-            module.backward_dw()
+            static_delayed_grads.setdefault(ANY_INDEX, []).extend(take_grads(module))
@@ (3 times)
 module.backward_dw()

@@ graph.py _make_graphed_callables.make_graphed_attribute_functions (at its start)
+delayed_grads = static_delayed_grads.get(graph_idx, [])
@@ graph.py _make_graphed_callables.make_graphed_attribute_functions
 return backward_dw, reset
@@ graph.py _make_graphed_callables.make_graphed_attribute_functions.backward_dw
-bwd_dw_graphs[graph_idx].replay()
+bwd_dw_graphs[graph_idx].replay()
+deliver_grads(delayed_grads)
@@ (or)
-bwd_dw_graph.replay()
+bwd_dw_graph.replay()
+deliver_grads(delayed_grads)
@@ graph.py _make_graphed_callables.make_graphed_attribute_functions.reset
 bwd_dw_graphs[graph_idx].reset()
+delayed_grads.clear()
@@ (or)
 helpers.release_static_state()
+delayed_grads.clear()
"""
EXPERTS = """
@@ module/grouped_linear.py _GroupedLinear.METHOD
 if ctx.fuse_wgrad_accumulation and hasattr(weight, "grad_added_to_main_grad"):
     ...
-elif ctx.fuse_wgrad_accumulation:
+elif ctx.fuse_wgrad_accumulation or (
+    ctx.wgrad_store is not None and ctx.wgrad_store.delay_wgrad_compute()
+):
     wgrad = None
"""
OPERATION_HAS_HOOKS = """
@@ graph.py _make_graphed_callables.make_graphed_attribute_functions.backward_dw
-isinstance(module, TransformerEngineBaseModule)
+hasattr(module, "_trigger_wgrad_accumulation_and_reduce_hooks")
"""
TE_COPIES_PARAM_GRADS = """
@@ graph.py _make_graphed_callables
+from ._te_delayed_wgrad import delayed_biases
+
+# A dgrad may return the grads of these, although their module delays its wgrads.
+static_delayed_biases = delayed_biases(callables)
+
 def _returned_param_grad_clone_slots(...):
     ...
@@ graph.py _make_graphed_callables._returned_param_grad_clone_slots
-getattr(module_params[idx - module_param_start], "skip_backward_post_hook", ANY)
+(
+    getattr(module_params[idx - module_param_start], "skip_backward_post_hook", False)
+    and id(module_params[idx - module_param_start]) not in static_delayed_biases
+)
"""
WARMUP_KEEPS_OUTPUTS = """
@@ graph.py _make_graphed_callables
 outputs_requiring_grad = tuple(ANY)
@@
 del outputs, grad_inputs
+# What stays of warmup keeps AccumulateGrad nodes of its stream alive, which no capture can wait for.
+outputs_requiring_grad = None
"""


def examine(source: Source) -> Verdict:
    capture = graph_capture(source)
    patches = [PATCH, EXPERTS.replace("METHOD", "backward"), MODULES]
    patches.append(EXPERTS.replace("METHOD", "_backward_grouped_tensor (if there)"))
    if "skip_backward_post_hook" in capture.text(capture.node):
        patches.append(TE_COPIES_PARAM_GRADS)
    if _names_outputs(capture):
        patches.append(WARMUP_KEEPS_OUTPUTS)
    operation = source.find(f"{PYTORCH}.ops.basic.grouped_linear")
    if operation and operation.find("GroupedLinear.backward_dw"):
        patches.append(OPERATION)
    if operation and operation.find("GroupedLinear._trigger_wgrad_accumulation_and_reduce_hooks"):
        patches.append(OPERATION_HAS_HOOKS)
    found = edits(source, "".join(patches))
    for module in {edit.module for edit in found} - {capture.module.name}:
        require_all_replaced(source.module(module), found)
    reason = "what backward_dw assigns to .grad is lost, under graphs and at a second microbatch"
    return applicable(reason, found, new_module("delayed_wgrad"))


def _names_outputs(capture: Definition) -> bool:
    """Whether the outputs of warmup outlive it under a name of their own, as in TE 2.13 to 2.18."""
    if capture.has("tuple(o for o in outputs if o.requires_grad)"):
        return False
    capture.one("outputs_requiring_grad = tuple(ANY)")
    return capture.has("del outputs, grad_inputs")


FIX = Fix(
    symptom="delayed wgrads: gradients of biases and unfused weights never arrive, are garbage, or stop with an error",
    group="pipelines and delayed wgrads",
    users="delay_wgrad_compute with biases, or with weights whose wgrads are not fused into main_grad",
    cost="memory for the gradients that a wgrad graph delivers, and an addition of each after its replay",
    examine=examine,
    requires=("backward-dw-hooks", "param-grad-lifetime", "wgrad-without-dgrad"),
    check_hints=("wgrad .grad",),
)
