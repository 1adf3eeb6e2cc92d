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

``not-needed``: all of the changes below stand where they would be made.
"""

from __future__ import annotations

from ..fix import Fix, Verdict
from ..provided import new_module
from ..shapes import Changes, graph_capture, require_names
from ..source import Source
from .fp8_weight_transposes import CAPTURED, COPY_INPUTS, replay

HOLD = """
from ._te_fp8_weights import CachedWeights

fwd_graph.cached_weights = CachedWeights(func)
"""

REFRESH = "fwd_graph.cached_weights.refresh(skip_fp8_weight_update)"


def examine(source: Source) -> Verdict:
    capture = graph_capture(source)
    forward = replay(capture)
    require_names(forward, "skip_fp8_weight_update")
    base = source.module("transformer_engine.pytorch.module.base")
    base.definition("TransformerEngineBaseModule.init_fp8_metadata").one("self._fp8_workspaces.clear()")
    changes = Changes()
    changes.after(capture, [match.node for match in capture.exactly(2, CAPTURED)], HOLD)
    changes.before(forward, [forward.one(COPY_INPUTS)], REFRESH)
    return changes.verdict(
        "graphs do not own the FP8 weights that they cache",
        "a graph holds the weights that it caches, and follows those of its modules",
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
