"""``cached-weight-lifetime``: the FP8 weights that a graph caches are freed, or go stale, while the graph reads them.

Upstream: open, TE 2.7 to main

Symptom, with ``cache_quantized_params=True`` (``fp8_weight_caching``): *illegal memory access*, or outputs of old
weights (error 1.0 to 1.4), in a graph that was captured for inference before the module trained, through a graph or
without, and in any graph after an evaluation in another recipe.

Modules keep quantized weights in ``_fp8_workspaces``. A workspace without the transposes that training needs is
replaced there, and a change of recipe clears all. The graph goes on with the addresses of the old ones, which nobody
owns any more, and neither learns of the other's updates. The graph now holds them; before its replay it takes over what
its modules have in their place, or gives these the update that it makes itself
(`te_graph_fixes/provided/fp8_weights.py`).
"""

from __future__ import annotations

from ..fix import Fix, Verdict, applicable, not_needed
from ..provided import new_module
from ..source import Source, unrecognized
from .fp8_weight_transposes import CAPTURED, COPY_INPUTS, GRAPH, replay

HOLD = """
from ._te_fp8_weights import CachedWeights

fwd_graph.cached_weights = CachedWeights(func)
"""

REFRESH = "fwd_graph.cached_weights.refresh(skip_fp8_weight_update)"


def examine(source: Source) -> Verdict:
    capture = source.definition(GRAPH, "_make_graphed_callables")
    forward = replay(capture)
    forward.require_parameters("skip_fp8_weight_update")
    captured = capture.exactly(2, CAPTURED)
    if len(capture.all(HOLD)) == 2 and forward.has(REFRESH):
        return not_needed("a graph holds the weights that it caches, and follows those of its modules")
    if capture.has("cached_weights"):
        raise unrecognized("no cached_weights", capture, "some")
    base = source.definition("transformer_engine.pytorch.module.base", "TransformerEngineBaseModule")
    base.one("self._fp8_workspaces.clear()")
    return applicable(
        "graphs do not own the FP8 weights that they cache",
        [
            *(capture.insert_after(each, HOLD) for each in captured),
            forward.insert_before(forward.one(COPY_INPUTS), REFRESH),
        ],
        new_module(source, "fp8_weights"),
    )


FIX = Fix(
    id="cached-weight-lifetime",
    summary="cached FP8 weights are freed, or go stale, while a graph reads them",
    symptom="illegal memory access or old weights: inference graph and training, evaluation in another recipe",
    upstream=(),
    affected=">=2.7",
    examine=examine,
)
