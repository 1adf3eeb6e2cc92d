"""``skip-flag-reset``: ``FP8GlobalStateManager.reset()`` frees the skip flag that graphs with cached weights read.

Upstream: open

Symptom: after a ``reset()``, graphs that were captured before it with ``cache_quantized_params=True`` read memory that
belongs to something else, or is nobody's, to learn whether their weights are new: weights are stale or always renewed.

The flag is one tensor of shape [1], whose address is part of those graphs. They keep it now, and set it where it is not
the manager's any more. Captures after the ``reset()`` that do not cache weights do not see it.

``not-needed``: all of the changes below stand where they would be made. ``not-applicable``: there is neither
quantization.py nor ``cache_quantized_params``, as before TE 2.9.
"""

from __future__ import annotations

from ..fix import Fix, Verdict, not_applicable
from ..shapes import Changes, graph_capture, lacks_quantization, require_names, skip_flag_state, start_of_warmup
from ..source import Source

FORGET = "cls.skip_fp8_weight_update_tensor = None", "cls.quantization_state = FP8GlobalState()"
KEEP = "static_skip_flag = {flag}"
SET = """
if skip_fp8_weight_update is not None:
    # After a reset() the flag is another one or none, and the graph has the address of its own.
    if {flag} is None:
        {flag} = static_skip_flag
    elif {flag} is not static_skip_flag:
        static_skip_flag.fill_(skip_fp8_weight_update)
"""


def examine(source: Source) -> Verdict:
    if lacks_quantization(source):
        return not_applicable("TE before 2.9, with fp8.py for quantization.py, is not covered")
    flag = f"{skip_flag_state(source)}.skip_fp8_weight_update_tensor"
    quantization = source.module("transformer_engine.pytorch.quantization")
    quantization.definition("FP8GlobalStateManager.reset").one(*FORGET)
    capture = graph_capture(source)
    forward = capture.inner("make_graphed_autograd_function").inner("Graphed").inner("forward")
    require_names(forward, "skip_fp8_weight_update")
    changes = Changes(".skip_fp8_weight_update_tensor")
    changes.before(capture, [start_of_warmup(capture)], KEEP.format(flag=flag))
    changes.first(forward, SET.format(flag=flag))
    return changes.verdict("reset() forgets the skip flag of graphs", "graphs keep their skip flag")


FIX = Fix(
    id="skip-flag-reset",
    summary="FP8GlobalStateManager.reset() frees the skip flag that graphs with cached weights read",
    symptom="after a reset(), earlier graphs keep stale FP8 weights, or read memory that is not theirs",
    upstream=(),
    affected=">=2.9",
    examine=examine,
    requires=("stale-fp8-weights",),
)
