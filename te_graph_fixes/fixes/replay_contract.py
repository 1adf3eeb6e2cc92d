"""``replay-contract``: programs that break what a capture has fixed compute wrong numbers, without a word.

Upstream: none yet, TE 2.10 to main

Each replay now looks at what its capture has fixed: what was replayed since its input was written, where modules,
parameters and ``main_grad`` are, and which parameters are trained. It raises `RuntimeError` where its result would not
be that of eager training (docs/maintainers/replay-contract.md). That depends on the program alone.

Some programs are made right instead. A tensor that is the sample of several inputs is copied for each of them. Copies
of a module have no graph, which reads the original's parameters. Outputs and gradients are copied where a checkpoint
may run a graph again before they are read (with ``leaf-grad-lifetime``).
"""

from ..fix import Fix

PATCH = """
@@ graph.py _graph_context_wrapper (at its start)
+from ._te_replay_contract import note_capture
+
+note_capture(*args, **kwargs)

@@ graph.py _make_graphed_callables
 per_callable_kwargs_keys = [list(kwargs.keys()) for kwargs in sample_kwargs]
+from ._te_own_copies import with_own_inputs
+
+# An order hands buffers on from one callable to another; without one each writes into its own.
+sample_args, sample_kwargs = with_own_inputs(
+    sample_args, sample_kwargs, _order is not None, _tree_flatten, _tree_unflatten
+)
@@
+from ._te_module_tensors import WarmupRecord
+from ._te_replay_contract import Contract
+
+warmup_run = WarmupRecord()
 visited_te_modules = ANY_EMPTY
@@ graph.py _make_graphed_callables.hook_fn (at its start)
+warmup_run.note(func_idx, module)
@@ graph.py _make_graphed_callables
+contracts = {}
+for i in range(len(graph_callables)):
+    contracts[fwd_graphs[i]] = Contract(
+        i,
+        graph_callables,
+        (fwd_graphs[i], bwd_graphs[i], bwd_dw_graphs[i]),
+        per_callable_static_outputs[i],
+        per_callable_static_grad_inputs[i],
+        per_callable_len_user_args[i],
+        per_callable_module_params[i],
+        need_bwd_dw_graph.get(i, False),
+        retain_graph_in_backward,
+        warmup_run,
+    )
 ret = []

@@ graph.py _make_graphed_callables.make_graphed_autograd_function
+contract = contracts[fwd_graph]
 class Graphed(torch.autograd.Function):
     ...
@@ graph.py _make_graphed_callables.make_graphed_autograd_function.functionalized
+contract.before_forward((*flatten_user_args, *flatten_user_kwargs))
 func_args = tuple(flatten_user_args) + tuple(flatten_user_kwargs) + module_params
 out = Graphed.apply(...)
+if contract.pool.keeps_outputs:
+    out = tuple(None if o is None else o.clone() for o in out)
@@ graph.py _make_graphed_callables.make_graphed_autograd_function.Graphed.forward (at its start)
+ctx.time, ctx.in_checkpoint, ctx.scales = contract.pool.now, contract.pool.in_checkpoint, contract.scales()
@@ graph.py _make_graphed_callables.make_graphed_autograd_function.Graphed.backward (at its start)
+contract.before_backward(ctx)

@@ graph.py _make_graphed_callables
+from ._te_own_copies import let_copies_be_eager
+
 func.forward = forward
+let_copies_be_eager(func)

@@ graph.py _make_graphed_callables.make_graphed_attribute_functions (at its start)
+contract = contracts[fwd_graphs[graph_idx]]
@@ graph.py _make_graphed_callables.make_graphed_attribute_functions.backward_dw
+contract.before_wgrad()
 ANY_GRAPH.replay()
@@ graph.py _make_graphed_callables.make_graphed_attribute_functions.reset (at its start)
+contract.release()
"""

FIX = Fix(
    symptom="garbage after the number of microbatches has grown, or after weights were offloaded and came back",
    group="misuse",
    affects="Megatron's --rampup-batch-size, from 0.18 --step-batch-size-schedule; offloaded weights; checkpoints",
    cost="a look at the modules, parameters and addresses of a callable at each replay",
    patch=PATCH,
    provides=("own_copies", "module_tensors", "replay_order", "warn_once", "replay_contract"),
    requires=("leaf-grad-lifetime",),
)
