"""Bug: a capture that only calibrates uses the default recipe instead of the caller's.

Upstream: none yet

If FP8 is enabled for no module, `make_graphed_callables` sets ``recipe`` to None, which means the default recipe. On
Hopper GPUs, the amax histories of the default recipe have 1024 entries, even if the caller's ``amax_history_len`` is
different. With the fix, ``recipe`` does not change if ``calibrating`` is set.
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
