"""``grouped-linear-amax-reduction``: GroupedLinear's reduction of the backward's amaxes becomes part of its graph.

Upstream: open, TE 2.10 to main (up to 2.9 it was left out of captures)

Symptom, delayed scaling, experts captured after some steps, as Megatron-Core does, or again: each replay of their
backward rolls the amax histories of all modules that were there, and makes new scales from them, besides what its end
does (scales off by 1.41 on the simulator). With several ranks the graph holds a collective.

Other modules do not reduce while a graph is captured, since the replay does. GroupedLinear does not either now.

``not-needed``: the condition of every reduction is `OUTSIDE`, behind `IMPORT` in its function or in the module.
"""

from __future__ import annotations

import ast

from ..fix import Fix, Verdict
from ..shapes import Changes
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
    imported = IMPORT in (ast.unparse(node) for node in module.tree.body if isinstance(node, ast.ImportFrom))
    reductions = module.text.count("reduce_and_update_fp8_tensors")
    if reductions != len(backwards):
        raise unrecognized(f"{len(backwards)} reductions of amaxes", module.path, str(reductions))
    changes = Changes()
    for backward in backwards:
        reduction = backward.one(REDUCES.format(ALWAYS), REDUCES.format(OUTSIDE))
        if not imported:
            changes.before(backward, [reduction], IMPORT + "\n")
        changes.replace(backward, ALWAYS, OUTSIDE)
    return changes.verdict(
        "GroupedLinear reduces amaxes in the capture of its backward, and so in each replay",
        "GroupedLinear does not reduce amaxes while a graph is captured",
    )


FIX = Fix(
    id="grouped-linear-amax-reduction",
    summary="GroupedLinear's reduction of the backward's amaxes becomes part of its graph",
    symptom="delayed scaling, experts captured after some steps: histories and scales are updated at each replay",
    upstream=(),
    affected=">=2.10",
    examine=examine,
)
