"""``replay-contract``: programs that break what a capture has fixed compute wrong numbers, without a word.

Upstream: open, TE 2.10 to main

Symptom: gradients are garbage after the number of microbatches has grown, after weights or gradient buffers were
offloaded and came back elsewhere, where a graph is replayed twice before its backward, or around a checkpoint.

Each replay now looks at what the capture has fixed (`te_graph_fixes/shipped/replay_contract.py`, shipped beside the
patched modules) and raises `RuntimeError` where its result would be another than eager training's: the sequence of
replays of one memory pool, the addresses of parameters, ``main_grad`` and the tensors of FP8 parameters, and which
parameters are trained. The gradients of inputs are returned as copies where a checkpoint may run a graph again before
they are read (with ``leaf-grad-lifetime``). FP8 graphs of delayed scaling that are replayed for training outside of an
autocast are warned of once.
"""

from __future__ import annotations

from ..fix import Fix
from ..patch import SemanticPatch

PATCH = """
@@ graph.py _graph_context_wrapper (at its start)
+from ._te_replay_contract import note_capture
+
+note_capture(args[0], kwargs["pool"])

@@ graph.py _make_graphed_callables
+from ._te_replay_contract import Contract, Run
+
+warmup_run = Run()
 visited_te_modules = ANY_EMPTY
@@ graph.py _make_graphed_callables.hook_fn (at its start)
+warmup_run.note(func_idx, module)
@@ graph.py _make_graphed_callables
+contracts = [
+    Contract(
+        number,
+        graph_callables,
+        (fwd_graphs[number], bwd_graphs[number], bwd_dw_graphs[number]),
+        (
+            per_callable_static_outputs[number],
+            (per_callable_static_grad_inputs[number] or ())[: per_callable_len_user_args[number]],
+        ),
+        per_callable_len_user_args[number],
+        per_callable_module_params[number],
+        warmup_run,
+        retain_graph_in_backward,
+        need_bwd_dw_graph.get(number, False),
+    )
+    for number in range(len(sample_args))
+]
 ret = []
@@
 make_graphed_autograd_function(
     ...,
+    contracts[i],
     fwd_graphs[i],
     ...
 )
@@
 def make_graphed_autograd_function(
     ...,
+    contract,
     fwd_graph,
     ...
 ):
     ...

@@ graph.py _make_graphed_callables.make_graphed_autograd_function.functionalized
+contract.replay_forward()
 func_args = tuple(flatten_user_args) + tuple(flatten_user_kwargs) + module_params
@@ graph.py _make_graphed_callables.make_graphed_autograd_function.Graphed.forward (at its start)
+ctx.replayed = contract.time
@@ graph.py _make_graphed_callables.make_graphed_autograd_function.Graphed.backward (at its start)
+contract.replay_backward(ctx)

@@ graph.py _make_graphed_callables.make_graphed_attribute_functions (at its start)
+contract = contracts[graph_idx]
@@ graph.py _make_graphed_callables.make_graphed_attribute_functions.backward_dw
+contract.replay_wgrad()
 bwd_dw_graphs[graph_idx].replay()
@@ (or)
+contract.replay_wgrad()
 bwd_dw_graph.replay()
@@ graph.py _make_graphed_callables.make_graphed_attribute_functions.reset (at its start)
+contract.release()
"""


FIX = Fix(
    id="replay-contract",
    summary="programs that break what a capture has fixed compute wrong numbers, without a word",
    symptom="garbage after the number of microbatches has grown, or after weights were offloaded and came back",
    group="misuse",
    users="Megatron's --rampup-batch-size and --step-batch-size-schedule; offloaded weights; checkpoints around graphs",
    upstream=(),
    affected=">=2.10",
    examine=SemanticPatch(
        PATCH,
        "a replay computes with whatever is where the capture has found its data",
        provides=("replay_contract",),
    ),
    requires=("leaf-grad-lifetime",),
)
