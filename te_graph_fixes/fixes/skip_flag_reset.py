"""Bug: ``FP8GlobalStateManager.reset()`` frees the skip flag that graphs with cached weights read.

Upstream: none yet

The flag is one tensor of shape [1]. Graphs that were captured with ``cache_quantized_params=True`` read it at a fixed
address. After a ``reset()`` this memory is free, or belongs to another tensor. With the fix, the graphs own the flag of
their capture. If the manager has no flag at a replay, it gets the graphs' flag, which TE then fills. If the manager has
another flag, the replay itself fills the graphs' flag. The fix does not change ``reset()``: until the next replay of
such a graph, a capture without cached weights finds no flag.
"""

from ..fix import Fix
from .shapes import REPLAY_STEPS

PATCH = """
@@ quantization.py FP8GlobalStateManager.reset
 cls.skip_fp8_weight_update_tensor = None
@@ (or)
 cls.quantization_state = FP8GlobalState()

@@ graph.py _make_graphed_callables
+from ._te_fp8_state_at_replay import global_state
+
+static_skip_flag = global_state().skip_fp8_weight_update_tensor
+
+def use_own_skip_flag(call):
+    # After a reset() there is another flag or none, but the graph reads its own flag.
+    state = global_state()
+    if state.skip_fp8_weight_update_tensor is None:
+        state.skip_fp8_weight_update_tensor = static_skip_flag
+    elif state.skip_fp8_weight_update_tensor is not static_skip_flag:
+        static_skip_flag.fill_(call.skip_update)
+
 visited_te_modules = ANY_EMPTY
@@
+if cache_quantized_params:
+    replays[i].add("forward prepare", "use own skip flag", use_own_skip_flag)
 ANY_GRAPHED = make_graphed_autograd_function(..., fwd_graphs[i], ...)
"""

FIX = Fix(
    symptom="after FP8GlobalStateManager.reset(), earlier graphs reuse old FP8 weights or read freed memory",
    group="FP8 state",
    affects="FP8GlobalStateManager.reset() after a capture with fp8_weight_caching (Megatron sets it)",
    patch=REPLAY_STEPS + PATCH,
    requires=("stale-fp8-weights",),
)
