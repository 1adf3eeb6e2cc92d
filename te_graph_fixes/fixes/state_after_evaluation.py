"""``state-after-evaluation``: an evaluation in bf16 or another recipe takes a graph's FP8 state from its modules.

Upstream: none yet, TE 2.10 to main

Modules note in each forward whether they run in FP8, and in which recipe, and drop a recipe state that does not fit. A
replay runs none of this, and goes on with the tensors of the capture. The graph now holds its recipe states, and does
before its replay what a forward does to them (`te_graph_fixes/shipped/recipe_states.py`). A module's new state is now
among those that are updated: after another recipe its scales stayed at 1.0 for good, eagerly too. Modules that are run
by ``sub.forward(x)``, which TE's hooks do not see, are covered where the recipe is that of the capture.
"""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables
+from ._te_recipe_states import RecipeStates
+
+graphed.recipe_states = RecipeStates(func.modules())
 def make_graphed_forward(...):
     ...

@@ graph.py _make_graphed_callables.make_graphed_forward.new_fwd
+graphed.recipe_states.resume(ANY_KNOWN, FP8GlobalStateManager)
 for m in func.modules():
     if m not in ANY_KNOWN:
         continue
     ...

@@ module/base.py TransformerEngineBaseModule.init_fp8_metadata
 self._fp8_workspaces.clear()
+# The new recipe state is to be registered for updates; the index is that of the old one.
+self.fp8_meta.pop(FP8GlobalStateManager.get_buffer_info(), None)
"""

FIX = Fix(
    symptom="after an evaluation in bf16 or another recipe te.ops graphs raise, and checkpoints lose FP8 state",
    group="evaluation and checkpoints",
    affects="an evaluation in bf16 or another recipe between two training steps",
    requires=("fp8-state-at-replay",),
    patch=PATCH,
    provides=("recipe_states",),
)
