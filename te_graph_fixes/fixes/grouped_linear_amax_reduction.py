"""``grouped-linear-amax-reduction``: GroupedLinear's reduction of the backward's amaxes becomes part of its graph.

Upstream: open, TE 2.10 to main (up to 2.9 it was left out of captures)

Symptom, delayed scaling, experts captured after some steps, as Megatron-Core does, or again: each replay of their
backward rolls the amax histories of all modules that were there, and makes new scales from them, besides what its end
does (scales off by 1.41 on the simulator). With several ranks the graph holds a collective.

Other modules do not reduce while a graph is captured, since the replay does. GroupedLinear does not either now.

``not-needed``: the condition of every reduction is `OUTSIDE`.
"""

from __future__ import annotations

import ast
from typing import cast

from ..fix import Fix, Verdict, applicable, not_needed
from ..source import Source, unrecognized

REDUCES = """
if {}:
    FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
"""
ALWAYS = "ctx.reduce_and_update_bwd_fp8_tensors"
OUTSIDE = f"{ALWAYS} and not is_graph_capturing()"
IMPORT = "from ..graph import is_graph_capturing"


def examine(source: Source) -> Verdict:
    module = source.module("transformer_engine.pytorch.module.grouped_linear")
    other = module.find("_GroupedLinear._backward_grouped_tensor")
    backwards = [module.definition("_GroupedLinear.backward"), *([other] if other else [])]
    reductions = [cast(ast.If, each.one(REDUCES.format(ALWAYS), REDUCES.format(OUTSIDE))) for each in backwards]
    guarded = [isinstance(each.test, ast.BoolOp) for each in reductions]
    if all(guarded) and IMPORT in module.text:
        return not_needed("GroupedLinear does not reduce amaxes while a graph is captured")
    if any(guarded):
        raise unrecognized("a reduction outside of captures, or none", backwards[0], "one in some places")
    return applicable(
        "GroupedLinear reduces amaxes in the capture of its backward, and so in each replay",
        [
            edit
            for backward, node in zip(backwards, reductions, strict=True)
            for edit in (backward.insert_before(node, IMPORT + "\n"), backward.replace(node.test, OUTSIDE))
        ],
    )


FIX = Fix(
    id="grouped-linear-amax-reduction",
    summary="GroupedLinear's reduction of the backward's amaxes becomes part of its graph",
    symptom="delayed scaling, experts captured after some steps: histories and scales are updated at each replay",
    upstream=(),
    affected=">=2.10",
    examine=examine,
)
