"""Bug: a graph without a backward prevents the backward's amax reduction of other modules.

Upstream: none yet, TE 2.10 to main

In an autocast, the first FP8 module with a backward updates the scales of all backwards when its own backward ends. TE
finds this module by a flag. An eager module clears the flag only in grad mode, and only if an input or parameter needs
a gradient. In contrast, `Graphed.forward` always clears it. After a frozen layer or a teacher, the scales of the
backward therefore stay 1. With the fix, a graph clears the flag only if its forward did so in the capture. A graph
without outputs that need a gradient restores the flag after the replay. Before that, the graph still decides by this
flag whether to set the skip flag of the weights.
"""

from ..fix import Fix
from ..shapes import global_state

PATCH = """
@@ graph.py _make_graphed_callables.Graphed.forward
-ctx.is_first_module = FP8GlobalStateManager.is_first_fp8_module()
+ctx.is_first_module = fwd_graph.fp8_state.takes_first_module and FP8GlobalStateManager.is_first_fp8_module()

@@ graph.py _make_graphed_callables.make_graphed_autograd_function.functionalized
+is_first_module = FIRST
 out = Graphed.apply(...)
@@
 out = Graphed.apply(...)
+if not any(o is not None and o.requires_grad for o in out):
+    # As eager modules do, leave the amax reduction of the backward to a module with a backward.
+    FIRST = is_first_module
"""

FIX = Fix(
    symptom="delayed scaling after a frozen or teacher module: gradients become 0, wgrads have a relative error of 1.2",
    group="FP8 state",
    affects="DelayedScaling (Megatron --fp8-recipe delayed) if an autocast begins with a frozen layer or a teacher",
    patch=PATCH,
    requires=("fp8-state-at-replay", "stale-fp8-weights"),
    names={"FIRST": lambda source: global_state(source, "is_first_fp8_module", "IS_FIRST_FP8_MODULE")},
)
