"""``fused-dummy-copies``: parameter grads that nobody reads are copied at each replay.

Upstream: open, TE 2.19 to main. https://github.com/NVIDIA/TransformerEngine/pull/2937 names the loss,
https://github.com/NVIDIA/Megatron-LM/pull/5893 switches all copies off for Megatron-Core 0.19 only.

Symptom: with wgrads that are fused into ``main_grad``, a dgrad's replay takes 15 to 20 % longer (experts of 4096 to
14336 on an H200: 2.84 ms instead of 2.33), and copies as large as the weights are alive at the peak.

From TE 2.19 on `Graphed.backward` copies every parameter grad that it returns. One that is a dummy in this graph is now
returned as TE's shared dummy, without a copy and without memory in the graph's pool. A gradient is a dummy if this
graph's backward has set ``grad_added_to_main_grad``; a mark that another graph has left does not count. The keyword
``clone_param_grads_on_return=False`` and parameters with ``skip_backward_post_hook`` are treated as before.
`param-grad-lifetime` does the same for TE before 2.19.

``not-needed``: dummies are shared in all places, and left out of what is copied. ``not-applicable``: there is no such
keyword, or `param-grad-lifetime` has brought it.
"""

from __future__ import annotations

import ast

from ..fix import Fix, Verdict, applicable, not_applicable, not_needed
from ..provided import new_module
from ..shapes import BACKWARD_CAPTURE, ahead, behind, lacks_parameter, require_names, start_of_warmup
from ..source import Definition, Edit, Source, unrecognized

NO_OPTION_OF_TE = "copied_grads = ANY"  # by param-grad-lifetime, which brings the option to TE before 2.19

SLOTS = "_returned_param_grad_clone_slots"

OPTION = "clone_param_grads_on_return"

IMPORT = "from ._te_fused_wgrads import ReturnedGrads, dummy_wgrads, is_shared_dummy, share_dummies"

DUMMIES = "dummy_wgrads(static_input_surface) as dummies"

GRADS = "static_grad_inputs = tuple(static_grad_inputs)"

SHARE = """
if is_training:
    static_grad_inputs = share_dummies(static_grad_inputs, static_input_surface, dummies)
"""

COPIED = """
if not clone_param_grads_on_return:
    return (False,) * len(static_grad_inputs)
module_param_start = len(static_grad_inputs) - len(module_params)
return tuple(ANY_CHOICE for idx in range(len(static_grad_inputs)))
"""

CHOICE = "idx >= module_param_start and not ANY_ALIASED"

NO_DUMMY = "not is_shared_dummy(static_grad_inputs[idx], module_params[idx - module_param_start])"


def examine(source: Source) -> Verdict:
    module = source.module("transformer_engine.pytorch.graph")
    public, capture = module.definition("make_graphed_callables"), module.definition("_make_graphed_callables")
    if lacks_parameter(public, OPTION) or (capture.has(NO_OPTION_OF_TE) and SLOTS not in module.text):
        return not_applicable("TE before 2.19 copies no parameter grads")
    require_names(public, OPTION)
    slots = capture.inner(SLOTS)
    slots.one(COPIED)
    if has_sharing(capture):
        slots.one(f"{CHOICE} and {NO_DUMMY}")
        return not_needed("grads that are dummies in a graph are returned as TE's shared dummies")
    capture.exactly(2, f"{SLOTS}(ANY, ANY)")
    return applicable(
        "parameter grads that stand for a wgrad in main_grad are copied",
        [*share_edits(capture), behind(slots, slots.one(CHOICE), f" and {NO_DUMMY}")],
        new_module(source, "fused_wgrads"),
    )


def has_sharing(capture: Definition) -> bool:
    """Whether dummies are shared already; raises `UnrecognizedError` where it is so in some places."""
    start_of_warmup(capture)
    capture.exactly(2, BACKWARD_CAPTURE)
    found = [capture.has(IMPORT), *(_enters(capture, node) for node in capture.all(BACKWARD_CAPTURE))]
    found += [len(capture.all(GRADS + SHARE)) == 2]
    if any(found) and not all(found):
        raise unrecognized("dummies that are shared in all places", capture, "a mixture")
    return all(found)


def share_edits(capture: Definition) -> list[Edit]:
    """Edits that find the dummies of each captured backward, and put TE's shared ones in their places."""
    backwards = [capture.statement_with(match.node) for match in capture.exactly(2, BACKWARD_CAPTURE)]
    require_names(capture, "is_training")
    return [
        capture.insert_before(start_of_warmup(capture), IMPORT + "\n"),
        *(ahead(capture, backward.items[0].context_expr, f"{DUMMIES}, ") for backward in backwards),
        *(capture.insert_after(match.node, SHARE) for match in capture.exactly(2, GRADS)),
    ]


def _enters(capture: Definition, context: ast.expr | ast.stmt) -> bool:
    return DUMMIES in map(ast.unparse, capture.statement_with(context).items)


FIX = Fix(
    id="fused-dummy-copies",
    summary="parameter grads that nobody reads, because their wgrads are in main_grad, are copied at each replay",
    symptom="fused wgrad: a backward replay takes 15 to 20 % longer, and needs the weights' size again at the peak",
    upstream=(
        "https://github.com/NVIDIA/TransformerEngine/pull/2937",
        "https://github.com/NVIDIA/Megatron-LM/pull/5893",
    ),
    affected=">=2.19",
    examine=examine,
)
