"""``replay-arguments``: graphs silently accept arguments that differ from their samples.

Upstream: none yet, TE 2.10 to main

A replay flattens its arguments and copies them into the static inputs by position. If a positional sample is passed as
a keyword, or an argument is missing, the first *weight* becomes an input. Dicts with another order of keys exchange
tensors. Inputs of another shape are broadcast. A replay now compares its arguments with the samples: number, shapes,
``requires_grad``, and the structure of dicts and other containers. It raises `TypeError` or `ValueError`
(`te_graph_fixes/shipped/replay_arguments.py`). A backward through a forward-only graph raises `RuntimeError`.
Inputs of another dtype are cast, with one warning except under `torch.autocast`: an fp32 input gives other numbers than
in bf16 (relative error 0.002). Keywords without a sample are still ignored, because callers pass
``is_first_microbatch``.
"""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables
+from ._te_replay_arguments import SampleArguments
+
 visited_te_modules = ANY_EMPTY
@@
+fwd_graphs[i].sample_arguments = SampleArguments(
+    graph_callables[i], sample_args[i], sample_kwargs[i], per_callable_kwargs_keys[i], is_training
+)
 ANY_GRAPHED = make_graphed_autograd_function(..., fwd_graphs[i], ...)

@@ graph.py _make_graphed_callables.make_graphed_autograd_function.functionalized
-flatten_user_args, _ = _tree_flatten(user_args)
+flatten_user_args, args_spec = _tree_flatten(user_args)
@@
-flatten_user_kwargs, _ = _tree_flatten([user_kwargs[key] for key in kwargs_keys])
+flatten_user_kwargs, kwargs_spec = _tree_flatten([user_kwargs[key] for key in kwargs_keys])
@@
+fwd_graph.sample_arguments.check((*flatten_user_args, *flatten_user_kwargs), args_spec, kwargs_spec)
 func_args = tuple(flatten_user_args) + tuple(flatten_user_kwargs) + module_params

@@ graph.py _make_graphed_callables.make_graphed_autograd_function.backward (at its start)
+if all(grad is None for grad in static_grad_outputs):
+    raise RuntimeError(
+        "This graph was captured for a forward alone: under torch.no_grad(), or with outputs that need no gradient"
+    )
"""

FIX = Fix(
    symptom="graphed(inp=x) computes with a weight instead of x, and dicts with another order of keys exchange tensors",
    group="misuse",
    affects="callers of make_graphed_callables that pass other arguments than their samples",
    cost="3 µs of CPU time a call, 9 with a dict of tensors",
    patch=PATCH,
    provides=("warn_once", "replay_arguments"),
)
