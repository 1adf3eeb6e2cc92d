"""Bug: an evaluation in bf16 or another recipe removes a graph's FP8 state from its modules.

Upstream: none yet, TE 2.10 to main

Each eager forward of a module records whether it runs in FP8 and in which recipe, and drops the state of any other
recipe. A replay does neither, and uses the tensors of the capture. With the fix, the graph owns its recipe states, and
each replay first does the work of an eager forward on these states. TE's hooks do not see modules run by
``sub.forward(x)``. The fix covers such modules if they run in the recipe of the capture.

After a forward in another recipe, TE never updates the scales of a module's new state. The fix does not change
this in eager training, and a graph computes the same numbers as eager training.
"""

from ..fix import Fix
from .shapes import REPLAY_STEPS

PATCH = """
@@ graph.py _make_graphed_callables
+from ._te_state_after_evaluation import RecipeStates
+
 visited_te_modules = ANY_EMPTY
@@
 func = graph_callables[ANY_INDEX]
 te_modules = visited_te_modules.get(ANY_INDEX, set())
+RecipeStates(replays[ANY_INDEX])
"""

FIX = Fix(
    symptom="after an evaluation in bf16 or another recipe, te.ops graphs raise errors, and checkpoints lose FP8 state",
    group="evaluation and checkpoints",
    affects="an evaluation in bf16 or another recipe between two training steps",
    requires=("fp8-state-at-replay",),
    patch=REPLAY_STEPS + PATCH,
)
