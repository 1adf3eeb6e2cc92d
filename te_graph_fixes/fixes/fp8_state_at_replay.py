"""``fp8-state-at-replay``: replays leave out what eager forwards do with the scales of delayed scaling.

Upstream: none yet, TE 2.10 to main

Before a replay TE puts the FP8 state of the modules that the warmup's forward hooks have seen into the buffers of the
amax reduction, with the recipe of the autocast around it. It misses modules that

1. are run by ``sub.forward(x)``, or are a `te.ops.Linear` or another fused operation that is captured by itself;
2. run in a ``te.autocast`` of their own; inside an outer one of another recipe it is an ``AttributeError``;
3. are recomputed by ``te.checkpoint`` around the graph: the second forward uses the scales that came after the first;
4. are attention in FP8 in current scaling, which TE scales with delay in part;
5. are in a `te.ops.Sequential` that runs eagerly between its capture and its first replay.

Modules now say in the capture which state they use, and a replay does the same with it
(`te_graph_fixes/shipped/captured_fp8.py`). The values that the warmup leaves in these states are taken back: TE does so
only for modules that it finds by ``modules()``, in the autocast of the capture. Operations that run without FP8 in a
capture get no state there, and nothing is put back into them (``AssertionError``).
"""

from ..fix import Fix

PATCH = """
@@ module/base.py TransformerEngineBaseModule.prepare_forward
 if not FP8GlobalStateManager.fp8_graph_capturing():
     FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(self.fp8_meta)
+from .._te_captured_fp8 import use_fp8_state
+
+use_fp8_state(self.fp8_meta)

@@ ops/fuser.py OperationFuser.__call__
 for idx, op in enumerate(self._basic_ops):
     op.pre_fuser_forward(requires_grad=idx >= self.first_op_requiring_backward)
+if recipe is not None and recipe.delayed():
+    from .._te_captured_fp8 import use_fp8_state
+
+    for op in self._basic_ops:
+        for mode in ("forward", "backward"):
+            if op.num_quantizers(mode):
+                use_fp8_state(op._fp8_metas[mode], of_module=False)

@@ graph.py _make_graphed_callables
+from ._te_captured_fp8 import begin_capture, with_fp8_state
+
+fp8_capture = begin_capture()
+used_fp8_states = {}
+outside_of_autocast = set()
 visited_te_modules = ANY_EMPTY
@@ (2 times)
+used_fp8_states[fwd_graph] = fp8_capture.begin_graph()
 with ..., _graph_context_wrapper(fwd_graph, ...):
     outputs = func(*args, **kwargs)
@@
+fp8_capture.end()
 ret = []
@@
-te_modules = visited_te_modules.get(i, set())
+te_modules = {m for m in visited_te_modules.get(i, ()) if (i, m) not in outside_of_autocast}
@@
 ANY_GRAPHED = make_graphed_autograd_function(..., fwd_graphs[i], ...)
+graphed = with_fp8_state(graphed, used_fp8_states[fwd_graphs[i]])

@@ graph.py make_graphed_callables.call_func (at its start)
+from ._te_captured_fp8 import note_first_module
@@ graph.py make_graphed_callables.call_func
 outputs = old_call_funcs[block_cls](self, *args, **kwargs)
+note_first_module()

@@ graph.py _make_graphed_callables.hook_fn (at its start)
+if not (FP8GlobalStateManager.is_fp8_enabled() and FP8GlobalStateManager.fp8_graph_capturing()):
+    # Without FP8, or in an autocast of its own: the recipe of a replay's autocast is not for it.
+    outside_of_autocast.update((func_idx, m) for m in module.modules())

@@ graph.py save_fp8_tensors (at its start)
+from ._te_captured_fp8 import has_other_state
@@ graph.py save_fp8_tensors
-isinstance(m, TransformerEngineBaseModule)
+isinstance(m, TransformerEngineBaseModule) and not has_other_state(m)
@@
-isinstance(m, BasicOperation)
+isinstance(m, BasicOperation) and not has_other_state(m)

@@ graph.py restore_fp8_tensors (at its start)
+from ._te_captured_fp8 import has_other_state
@@ graph.py restore_fp8_tensors
-isinstance(m, TransformerEngineBaseModule)
+isinstance(m, TransformerEngineBaseModule) and not has_other_state(m)
@@
-isinstance(m, BasicOperation)
+isinstance(m, BasicOperation) and module_tensors is not None and not has_other_state(m)
"""

FIX = Fix(
    symptom="FP8 scales stay at their first value: modules called by .forward(), te.ops.Linear alone, an own autocast",
    group="FP8 state",
    affects="DelayedScaling (Megatron --fp8-recipe delayed); attention in FP8 (fp8_dpa) in current scaling",
    patch=PATCH,
    provides=("captured_fp8",),
    requires=("nested-autocast",),
    check_hints=("fp8 gradient", "fp8 backward .grad", "fp8 backward main_grad"),
)
