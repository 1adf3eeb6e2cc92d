"""``skip-flag-reset``: ``FP8GlobalStateManager.reset()`` frees the skip flag that graphs with cached weights read.

Upstream: open

Symptom: after a ``reset()``, graphs that were captured before it with ``cache_quantized_params=True`` read memory that
belongs to something else, or is nobody's, to learn whether their weights are new: weights are stale or always renewed.

The flag is one tensor of shape [1], whose address is part of those graphs. ``reset()`` keeps it now. Captures that do
not cache weights must not see it, hence the requirement.

``not-needed``: `KEEP`, or a reset() of plain assignments without the flag. ``not-applicable``: there is
neither quantization.py nor ``cache_quantized_params``, as before TE 2.9.
"""

from __future__ import annotations

import ast

from ..fix import Fix, Verdict, applicable, not_applicable, not_needed
from ..shapes import Changes, lacks_quantization
from ..source import Source, unrecognized

FORGET = "cls.skip_fp8_weight_update_tensor = None"
KEEP = """
FP8GlobalState(
    # Graphs have its address.
    skip_fp8_weight_update_tensor=cls.quantization_state.skip_fp8_weight_update_tensor
)
"""


def examine(source: Source) -> Verdict:
    if lacks_quantization(source):
        return not_applicable("TE before 2.9, with fp8.py for quantization.py, is not covered")
    quantization = source.module("transformer_engine.pytorch.quantization")
    manager = quantization.definition("FP8GlobalStateManager")
    reset = quantization.definition("FP8GlobalStateManager.reset")
    if manager.has("quantization_state = FP8GlobalState()"):
        quantization.definition("FP8GlobalState").one("skip_fp8_weight_update_tensor: ANY_TYPE = None")
        reset.one("cls.quantization_state = ANY")
        changes = Changes()
        changes.replace(reset, "FP8GlobalState()", KEEP)
        return changes.verdict("reset() renews all state", "reset() keeps the skip flag")
    manager.one("skip_fp8_weight_update_tensor = None")
    if reset.has(FORGET):
        return applicable("reset() forgets the skip flag", [reset.delete(reset.one(FORGET))])
    plain = [
        isinstance(node, ast.Assign) and isinstance(node.value, (ast.Constant, ast.Dict, ast.List))
        for node in reset.node.body[1:]
    ]
    if "skip_fp8_weight_update_tensor" in reset.text(reset.node) or not all(plain):
        raise unrecognized(f"`{FORGET}`, or plain assignments without it", reset)
    reset.one("cls.IS_FIRST_FP8_MODULE = False")
    return not_needed("reset() keeps the skip flag")


FIX = Fix(
    id="skip-flag-reset",
    summary="FP8GlobalStateManager.reset() frees the skip flag that graphs with cached weights read",
    symptom="after a reset(), earlier graphs keep stale FP8 weights, or read memory that is not theirs",
    upstream=(),
    affected=">=2.9",
    examine=examine,
    requires=("stale-fp8-weights",),
)
