"""Bug: programs that violate the assumptions of a capture compute wrong numbers without an error.

Upstream: none yet, TE 2.10 to main

With the fix, each replay checks its preconditions. No other graph may have overwritten the data that the replay reads.
The modules must be the same objects as at the capture, the parameters and each ``main_grad`` must be at the same
addresses, and the same parameters must be trained. A replay raises `RuntimeError` if its result could differ from eager
training (docs/maintainers/replay-contract.md). The errors depend only on the program, not on timing.

Some programs become correct instead. A tensor that is the sample argument of several inputs is copied for each input.
Copies of a module have no graph, because a graph reads the parameters of the original. Outputs and gradients are
returned as copies if a checkpoint may recompute a graph before they are read (with ``leaf-grad-lifetime``).
"""

from ..fix import Fix
from .shapes import REPLAY_STEPS

PATCH = """
@@ graph.py _make_graphed_callables
 per_callable_kwargs_keys = [list(kwargs.keys()) for kwargs in sample_kwargs]
+from ._te_replay_contract_copies import with_own_inputs
+
+# With an order, callables share static inputs. Without an order, each callable writes to its own inputs.
+sample_args, sample_kwargs = with_own_inputs(
+    sample_args, sample_kwargs, _order is not None, _tree_flatten, _tree_unflatten
+)
@@
+from ._te_replay_contract import Preconditions
+from ._te_replay_contract_record import CaptureRecord, Record
+
+capture_record = CaptureRecord(callables, flatten_sample_args, replays)
 visited_te_modules = ANY_EMPTY
@@ graph.py _make_graphed_callables.hook_fn (at its start)
+capture_record.note_warmup(replays[func_idx], module, outputs)
@@ graph.py _make_graphed_callables (2 times)
-with ..., _graph_context_wrapper(fwd_graph, ...):
+with capture_record.during_forward(replays.of(fwd_graph), mempool), ..., _graph_context_wrapper(fwd_graph, ...):
     ...
@@ (2 times)
 with ..., _graph_context_wrapper(bwd_graph, ...):
+    capture_record.note_graph("backward", replays.of(bwd_graph), mempool)
     ...
@@ (2 times)
 with ..., _graph_context_wrapper(bwd_dw_graph, ...):
+    capture_record.note_graph("wgrad", replays.of(bwd_dw_graph), mempool)
     ...
@@ graph.py _make_graphed_callables
+for i in range(len(graph_callables)):
+    replays[i].record = Record(
+        capture_record,
+        replays[i],
+        graph_callables,
+        i,
+        _num_layers_per_chunk if _order is not None else [len(callables)],
+        per_callable_static_outputs[i],
+        per_callable_static_grad_inputs[i],
+        per_callable_len_user_args[i],
+        per_callable_static_input_surfaces[i],
+        retain_graph_in_backward,
+    )
+    Preconditions(replays[i])
 ret = []

@@ graph.py _make_graphed_callables
+from ._te_replay_contract_copies import capture_attributes
+
+attributes_before_capture = capture_attributes(func)
 func.forward = forward
@@
 setattr(ret[-1], "reset", reset_func)
+if ret[-1] is func:
+    from ._te_replay_contract_copies import drop_graph_from_copies
+
+    drop_graph_from_copies(func, attributes_before_capture)
"""

FIX = Fix(
    symptom="wrong numbers after the number of microbatches has grown, or after weights were offloaded and reloaded",
    group="replay preconditions",
    affects="Megatron's --rampup-batch-size and --step-batch-size-schedule; offloaded weights; activation checkpoints",
    cost="each replay compares the modules, parameters and addresses of its callable",
    patch=REPLAY_STEPS + PATCH,
    requires=("leaf-grad-lifetime",),
)
