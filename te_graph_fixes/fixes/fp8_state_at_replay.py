"""Bug: replays omit the work of eager forwards on the scales of delayed scaling.

Upstream: none yet, TE 2.10 to main

Before a replay, TE registers the FP8 state of the modules that its forward hooks saw in the warmup, with the recipe of
the current autocast. This is wrong in six cases:

1. A module is run by ``sub.forward(x)``, or a `te.ops.Linear` or another fused operation is captured by itself.
2. A module runs in a ``te.autocast`` of its own. If the outer autocast has another recipe, the program
   stops with ``AttributeError``.
3. A module is recomputed by ``te.checkpoint`` around the graph. The second forward uses newer scales than the first.
4. A module computes FP8 attention in current scaling. TE computes parts of it in delayed scaling.
5. A module is in a `te.ops.Sequential` that runs eagerly between its capture and its first replay.
6. Two captured modules contain a module that ``te.checkpoint`` recomputes. TE expects backwards in the order of their
   forwards, but captures them in reverse. A recomputation then has the scales, or even the precision, of another
   forward.

With the fix, modules note during the capture the state that they use and the ends of their own autocasts. A replay does
the work of an eager forward on this state. After the capture, each of these states gets its values from before the
warmup. TE itself restores only modules listed by ``modules()``, in the recipe of the capture, and raises
``AssertionError`` if an operation runs without FP8. A capture raises an error if eager training would update scales
between two runs of a module, or if a checkpoint would use the copied scales of another checkpoint (docs/limits.md).
"""

from ..fix import Fix
from .shapes import REPLAY_STEPS

PATCH = """
@@ module/base.py TransformerEngineBaseModule.prepare_forward
 self.init_fp8_metadata(num_gemms=num_gemms)
+if hasattr(FP8GlobalStateManager, "fp8_capture"):
+    from .._te_fp8_state_at_replay import use_fp8_state
+
+    use_fp8_state(self, inp)

@@ ops/fuser.py OperationFuser.__call__
 for idx, op in enumerate(self._basic_ops):
     op.pre_fuser_forward(requires_grad=idx >= self.first_op_requiring_backward)
+if hasattr(FP8GlobalStateManager, "fp8_capture") or hasattr(self, "was_captured"):
+    if recipe is not None:
+        from .._te_fp8_state_at_replay import use_fp8_state_of_operations
+
+        use_fp8_state_of_operations(self)

@@ quantization.py FP8GlobalStateManager.autocast_exit
 ANY_DEPTH -= 1
+if hasattr(cls, "fp8_capture") and not _graph:
+    from ._te_fp8_state_at_replay import end_autocast
+
+    end_autocast(enabled)

@@ quantization.py FP8GlobalStateManager.is_first_fp8_module
 ANY_FIRST = ANY_FLAG
 ANY_FLAG = False
+if ANY_FIRST and hasattr(cls, "fp8_capture"):
+    from ._te_fp8_state_at_replay import take_first_module
+
+    take_first_module()

@@ graph.py _make_graphed_callables
+from ._te_fp8_state_at_replay import current_capture
+
+fp8_capture = current_capture()
 visited_te_modules = ANY_EMPTY
@@ (2 times)
+fp8_capture.begin_forward(replays.of(fwd_graph))
 with ..., _graph_context_wrapper(fwd_graph, ...):
     outputs = func(*args, **kwargs)
@@ (2 times)
+fp8_capture.begin_backward(replays.of(bwd_graph))
 with ..., _graph_context_wrapper(bwd_graph, ...):
     ...
@@
+fp8_capture.end(replays, is_training)
 ret = []
@@
-te_modules = visited_te_modules.get(i, set())
+te_modules = replays[i].fp8_state.in_autocast

@@ graph.py _make_graphed_callables._run_warmup_forward (if there)
+fp8_capture.begin_warmup(replays[func_idx])
 args = sample_args[func_idx]
@@ graph.py _make_graphed_callables._run_warmup_backward (if there)
+fp8_capture.begin_backward(replays[func_idx])
 static_input_surface = per_callable_static_input_surfaces[func_idx]

@@ graph.py make_graphed_callables.call_func (at its start)
+from ._te_fp8_state_at_replay import end_captured_forward
@@ graph.py make_graphed_callables.call_func
 outputs = old_call_funcs[block_cls](self, *args, **kwargs)
+end_captured_forward(self)

@@ graph.py make_graphed_callables
+from ._te_fp8_state_at_replay import begin_capture
+
+fp8_capture = begin_capture()
 saved_fp8_tensors = save_fp8_tensors(...)

@@ graph.py save_fp8_tensors (at its start)
+from ._te_fp8_state_at_replay import has_other_state
@@ graph.py save_fp8_tensors
-isinstance(m, TransformerEngineBaseModule)
+isinstance(m, TransformerEngineBaseModule) and not has_other_state(m)
@@
-isinstance(m, BasicOperation)
+isinstance(m, BasicOperation) and not has_other_state(m)

@@ graph.py restore_fp8_tensors (at its start)
+from ._te_fp8_state_at_replay import has_other_state
@@ graph.py restore_fp8_tensors
-isinstance(m, TransformerEngineBaseModule)
+isinstance(m, TransformerEngineBaseModule) and not has_other_state(m)
@@
-isinstance(m, BasicOperation)
+isinstance(m, BasicOperation) and not has_other_state(m, module_tensors)
"""

FIX = Fix(
    symptom="FP8 scales stay fixed in modules run by .forward() or in their own autocast, or in a single te.ops.Linear",
    group="FP8 state",
    affects="DelayedScaling (Megatron --fp8-recipe delayed); attention in FP8 (fp8_dpa) in current scaling",
    patch=REPLAY_STEPS + PATCH,
    requires=("failed-capture-state", "nested-autocast"),
    after=("nested-autocast",),
    check_hints=("fp8 gradient", "fp8 backward .grad", "fp8 backward main_grad"),
)
