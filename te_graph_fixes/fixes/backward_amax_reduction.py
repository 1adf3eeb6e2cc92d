"""Bug: a graph without a backward prevents the backward's amax reduction of other modules.

Upstream: none yet, TE 2.10 to main

In an autocast, the first FP8 module with a backward updates the scales of all backwards when its own backward ends. TE
finds this module by a flag. An eager module clears the flag only in grad mode, and only if an input or parameter needs
a gradient. In contrast, `Graphed.forward` always clears it. After a frozen layer or a teacher, the scales of the
backward therefore stay 1. With the fix, a replay clears the flag only if it has a backward and the forward cleared the
flag in the capture.
"""

from ..fix import Fix
from .shapes import REPLAY_STEPS

PATCH = """
@@ graph.py _make_graphed_callables.make_graphed_autograd_function
+from ._te_backward_amax_reduction import add_take, is_in_graph
+
+add_take(replay)
 class Graphed(torch.autograd.Function):
     ...
@@ graph.py _make_graphed_callables.make_graphed_autograd_function.Graphed.forward
-ctx.is_first_module = FP8GlobalStateManager.is_first_fp8_module()
+ctx.is_first_module = is_in_graph(replay.fp8_state)
"""

FIX = Fix(
    symptom="delayed scaling after a frozen or teacher module: gradients become 0, wgrads have a relative error of 1.2",
    group="FP8 state",
    affects="DelayedScaling (Megatron --fp8-recipe delayed) if an autocast begins with a frozen layer or a teacher",
    patch=REPLAY_STEPS + PATCH,
    requires=("fp8-state-at-replay", "stale-fp8-weights"),
)
