"""``calibration-recipe``: a capture that only calibrates does it for the default recipe instead of the caller's.

Upstream: none yet

``recipe`` is set to None where FP8 is enabled for no module, and None means the default: histories of 1024 entries,
whatever ``recipe.amax_history_len`` is. It is now kept where ``calibrating`` is set.
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
    symptom="a capture with calibrating=True records its amaxes for the default recipe, not for yours",
    group="FP8 state",
    affects="make_graphed_callables(enabled=False, calibrating=True, recipe=...)",
    patch=PATCH,
)
