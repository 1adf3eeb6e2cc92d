"""Parts of patches that several fixes share."""

SHARED_DUMMIES = """
@@ module/layernorm_mlp.py _LayerNormMLP.backward (at its start)
+from .base import get_dummy_wgrad
@@ module/layernorm_mlp.py _LayerNormMLP.backward (2 times)
-torch.empty(ANY_SHAPE, dtype=ANY_DTYPE, device=torch.cuda.current_device(), requires_grad=False)
+(
+    get_dummy_wgrad(list(ANY_SHAPE), ANY_DTYPE)
+    if is_graph_capturing()
+    else torch.empty(ANY_SHAPE, dtype=ANY_DTYPE, device=torch.cuda.current_device(), requires_grad=False)
+)
"""
"""In a capture, `LayerNormMLP` returns TE's shared dummies for wgrads in ``main_grad``, as all other modules do.

Without these hunks, it returns dummies in graph memory, which have to be copied.
"""

SKIP_FLAG = """
@@ quantization.py FP8GlobalStateManager
 skip_fp8_weight_update_tensor = None
@@ quantization.py FP8GlobalState (or)
 skip_fp8_weight_update_tensor: ANY_TYPE = None
"""
"""Hunks that match if the result of `global_state` (`te_graph_fixes/support/fp8_state_at_replay.py`) has the flag."""

REPLAY_STEPS = """
@@ graph.py _make_graphed_callables
+from ._te_replay import Replays
+
+replays = Replays(fwd_graphs, bwd_graphs, bwd_dw_graphs)
 visited_te_modules = ANY_EMPTY

@@ graph.py _make_graphed_callables.make_graphed_autograd_function (at its start)
+replay = replays.of(fwd_graph)
@@ graph.py _make_graphed_callables.make_graphed_autograd_function
 class Graphed(torch.autograd.Function):
     ...
+
+replay.surround_forward(Graphed)
+replay.surround_backward(Graphed)
@@ graph.py _make_graphed_callables.make_graphed_autograd_function.functionalized (at its start)
+register_states = user_kwargs.pop("_register_states", None)
@@ graph.py _make_graphed_callables.make_graphed_autograd_function.functionalized
-flatten_user_args, _ = _tree_flatten(user_args)
+flatten_user_args, args_spec = _tree_flatten(user_args)
@@
-flatten_user_kwargs, _ = _tree_flatten(ANY)
+flatten_user_kwargs, kwargs_spec = _tree_flatten(ANY)
@@
+call = replay.check(
+    skip_update=skip_fp8_weight_update,
+    inputs=(*flatten_user_args, *flatten_user_kwargs),
+    specs=(args_spec, kwargs_spec),
+    keywords=user_kwargs,
+    register_states=register_states,
+)
 func_args = tuple(flatten_user_args) + tuple(flatten_user_kwargs) + module_params
@@
-Graphed.apply(skip_fp8_weight_update, ...)
+Graphed.apply(call, ...)

@@ graph.py _make_graphed_callables.make_graphed_forward.new_fwd
-if FP8GlobalStateManager.is_fp8_enabled():
+def register_states():
     ...
@@
-graphed(*user_args, **user_kwargs)
+graphed(
+    *user_args,
+    **user_kwargs,
+    _register_states=register_states if FP8GlobalStateManager.is_fp8_enabled() else None,
+)

@@ graph.py _make_graphed_callables.make_graphed_attribute_functions (at its start)
+replay = replays[graph_idx]
@@ graph.py _make_graphed_callables.make_graphed_attribute_functions.backward_dw
-ANY_GRAPH.replay()
+replay.wgrad(ANY_GRAPH.replay)
@@ graph.py _make_graphed_callables.make_graphed_attribute_functions.reset (at its start)
+replay.reset()
"""
"""Hunks that make TE's code call the steps that fixes add to a replay (`te_graph_fixes/support/replay.py`)."""
