"""``replay-contract``: programs that break what a capture has fixed compute wrong numbers, without a word.

Upstream: none yet, TE 2.10 to main

Symptom: gradients are garbage after the number of microbatches has grown, after weights or gradient buffers were
offloaded and came back elsewhere, where a graph is replayed twice before its backward, or around a checkpoint.

All graphs that share a memory pool have a place in the sequence of their captures. Each replay now looks at what its
capture has fixed (`te_graph_fixes/shipped/replay_contract.py`, shipped beside the patched modules): the graphs that
were replayed since its input was written, the addresses of parameters and ``main_grad``, which parameters are trained.
It raises `RuntimeError` where its result would not be that of eager training
(docs/maintainers/replay-contract.md). A tensor that is the sample of several inputs is copied for each of
them; outputs and gradients are copied where a checkpoint may run
a graph again before they are read (with ``leaf-grad-lifetime``).

Without it such programs stay wrong with all other fixes too; by how much depends on what the memory that they read
holds.
"""

from ..fix import Fix
from ..patching.patch import SemanticPatch

PATCH = """
@@ graph.py _graph_context_wrapper (at its start)
+from ._te_replay_contract import note_capture
+
+note_capture(*args, **kwargs)

@@ graph.py _make_graphed_callables
 per_callable_kwargs_keys = [list(kwargs.keys()) for kwargs in sample_kwargs]
+from ._te_replay_contract import with_own_inputs
+
+# An order hands buffers on from one callable to another; without one each writes into its own.
+sample_args, sample_kwargs = with_own_inputs(
+    sample_args, sample_kwargs, _order is not None, _tree_flatten, _tree_unflatten
+)
@@
+from ._te_replay_contract import WarmupRecord, make_contracts, mark_written, saved_tensors_hooks
+
+warmup_run = WarmupRecord()
 visited_te_modules = ANY_EMPTY
@@ graph.py _make_graphed_callables.hook_fn (at its start)
+warmup_run.note(func_idx, module)
@@ graph.py _make_graphed_callables
+contracts = make_contracts(
+    graph_callables,
+    list(zip(fwd_graphs, bwd_graphs, bwd_dw_graphs)),
+    per_callable_static_outputs,
+    per_callable_static_grad_inputs,
+    per_callable_len_user_args,
+    per_callable_module_params,
+    need_bwd_dw_graph,
+    warmup_run,
+    retain_graph_in_backward,
+)
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
+is_next = contract.pool.next == contract.quick_forward and torch.is_grad_enabled()
+if is_next and saved_tensors_hooks(True) is None:
+    contract.pool.next += 1
+    mark_written(contract.outputs)
+else:
+    contract.look_forward((*flatten_user_args, *flatten_user_kwargs), user_kwargs.get("is_first_microbatch"))
 func_args = tuple(flatten_user_args) + tuple(flatten_user_kwargs) + module_params
 out = Graphed.apply(...)
+if contract.pool.keeps_outputs:
+    out = tuple(None if o is None else o.clone() for o in out)
@@ graph.py _make_graphed_callables.make_graphed_autograd_function.Graphed.forward (at its start)
+ctx.run, ctx.in_checkpoint = contract.pool.run, contract.pool.in_checkpoint
@@ graph.py _make_graphed_callables.make_graphed_autograd_function.Graphed.backward (at its start)
+contract.before_backward(ctx)

@@ graph.py _make_graphed_callables
+from ._te_replay_contract import copy_without_graphs
+
 func.forward = forward
+func.__deepcopy__ = lambda memo, func=func: copy_without_graphs(func, memo)

@@ graph.py _make_graphed_callables.make_graphed_attribute_functions (at its start)
+contract = contracts[graph_idx]
@@ graph.py _make_graphed_callables.make_graphed_attribute_functions.backward_dw
+contract.before_wgrad()
 bwd_dw_graphs[graph_idx].replay()
@@ (or)
+contract.before_wgrad()
 bwd_dw_graph.replay()
@@ graph.py _make_graphed_callables.make_graphed_attribute_functions.reset (at its start)
+contract.release()
"""

FIX = Fix(
    symptom="garbage after the number of microbatches has grown, or after weights were offloaded and came back",
    group="misuse",
    users="Megatron's --rampup-batch-size, from 0.18 --step-batch-size-schedule; offloaded weights; checkpoints",
    cost="a look at the addresses of parameters, twice a step",
    examine=SemanticPatch(
        PATCH, "a replay computes with whatever is where the capture has found its data", provides=("replay_contract",)
    ),
    requires=("leaf-grad-lifetime",),
)
