"""``warmup-reset``: the first microbatch's behaviour is captured into every graph.

Upstream: https://github.com/NVIDIA/TransformerEngine/pull/2715 (TE 2.14)

Symptom: fused wgrad overwrites ``main_grad`` at every replay, so that only the last microbatch of a step counts
(wgrad at 0.577 of its norm for three microbatches).

After warmup, `_make_graphed_callables` sets ``is_first_microbatch = True`` on every module that has the attribute, as
Megatron's do. The capture that follows reads it and freezes "first microbatch" into the graph: no accumulation. The
loop is removed. Removing it where FP8 experts do not read the graph's skip flag would freeze their weights instead,
hence the requirement.
"""

from __future__ import annotations

from ..fix import Fix, Verdict, applicable, not_needed
from ..source import Source, UnrecognizedError

RESET = """
for ANY_MODULE in func.modules():
    if hasattr(module, "is_first_microbatch"):
        module.is_first_microbatch = True
"""


def examine(source: Source) -> Verdict:
    capture = source.definition("transformer_engine.pytorch.graph", "_make_graphed_callables")
    if capture.has(RESET):
        return applicable(
            "modules are reset to the first microbatch after warmup", [capture.delete(capture.one(RESET))]
        )
    if "is_first_microbatch = " in capture.text(capture.node):
        raise UnrecognizedError(
            f"looked for `{' '.join(RESET.split())}` in {capture.qualname} ({capture.module.path}), found another "
            "assignment to is_first_microbatch"
        )
    return not_needed("warmup leaves is_first_microbatch alone")


FIX = Fix(
    id="warmup-reset",
    summary="warmup resets modules to the first microbatch, which the graph then repeats",
    symptom="fused wgrad overwrites main_grad on every replay: wgrad x0.577 for three microbatches",
    upstream=("https://github.com/NVIDIA/TransformerEngine/pull/2715",),
    affected="<2.14",
    examine=examine,
    requires=("grouped-linear-skip-flag",),
)
