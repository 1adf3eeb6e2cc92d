"""``calibrating-recipe``: a capture that only calibrates does it for the default recipe instead of the caller's.

Upstream: open

Symptom: ``make_graphed_callables(..., enabled=False, calibrating=True, recipe=recipe)`` collects amaxes in histories of
1024 entries, whatever ``recipe.amax_history_len`` is; FP8 state of another format or recipe type than the caller's.

``recipe`` is set to None where FP8 is enabled for no module, and None means the default. It is kept where
``calibrating`` is set.

``not-needed``: the choice of the recipe asks `NEITHER`. ``not-applicable``: there is
neither quantization.py nor ``cache_quantized_params``, as before TE 2.9.
"""

from __future__ import annotations

from ..fix import Fix, Verdict, not_applicable
from ..shapes import Changes, lacks_quantization, require_names
from ..source import Source

CHOICE = """
if any(enabled) and recipe is None:
    recipe = get_default_fp8_recipe()
elif ANY_NONE:
    recipe = None
"""
NONE, NEITHER = "not any(enabled)", "not any(enabled) and not calibrating"


def examine(source: Source) -> Verdict:
    module = source.module("transformer_engine.pytorch.graph")
    public = module.definition("make_graphed_callables")
    if lacks_quantization(source):
        return not_applicable("TE before 2.9, with fp8.py for quantization.py, is not covered")
    require_names(public, "calibrating", "recipe", "enabled")
    public.one("if calibrating is None: calibrating = False")
    public.one(CHOICE)
    changes = Changes()
    changes.replace(public, NONE, NEITHER)
    return changes.verdict("recipe is dropped where FP8 is not enabled", "a capture that calibrates keeps its recipe")


FIX = Fix(
    id="calibrating-recipe",
    summary="a capture that only calibrates uses the default recipe instead of the caller's",
    symptom="amax histories of 1024 entries, or of another recipe, after a capture with calibrating=True",
    upstream=(),
    affected=">=2.9",
    examine=examine,
)
