"""``replay-arguments``: graphs take arguments that are not those of their samples, without a word.

Upstream: none yet, TE 2.10 to main

A replay flattens its arguments and copies them into the static inputs by position. A keyword for a sample that was
positional, or a missing argument, gives it the first *weight* as input; dicts with their keys in another order exchange
tensors; inputs of another shape are broadcast. It now compares number, shapes, need of gradients and, where an argument
is a dict or another container, its structure with the samples first, and raises `TypeError` or `ValueError`
(`te_graph_fixes/shipped/replay_arguments.py`). A backward through a graph that was captured for a forward alone raises
`RuntimeError`. Inputs of another dtype are cast, which is warned of once, except under `torch.autocast`: an fp32 input
gives other numbers in bf16 (0.002). Keywords that were not among the samples are ignored as before: callers give
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
    symptom="graphed(inp=x) computes with a weight in place of x, and dicts with other key orders exchange tensors",
    group="misuse",
    affects="own callers of make_graphed_callables that pass other arguments than their samples",
    cost="3 µs of the CPU a call, with a dict of tensors 9",
    patch=PATCH,
    provides=("warn_once", "replay_arguments"),
)
