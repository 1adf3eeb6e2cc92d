"""``calibration-recipe``: a capture that only calibrates uses the default recipe instead of the caller's.

Upstream: none yet

``recipe`` is set to None if FP8 is enabled for no module, and None means the default recipe. Its histories have 1024
entries, whatever ``recipe.amax_history_len`` is. The recipe is now kept if ``calibrating`` is set.
"""

from ..fix import Fix

PATCH = """
@@ graph.py make_graphed_callables
 if any(enabled) and recipe is None:
     recipe = get_default_fp8_recipe()
-elif not any(enabled):
+elif not any(enabled) and not calibrating:
     recipe = None
"""

FIX = Fix(
    symptom="a capture with calibrating=True records amaxes for the default recipe instead of yours",
    group="FP8 state",
    affects="make_graphed_callables(enabled=False, calibrating=True, recipe=...)",
    patch=PATCH,
)
