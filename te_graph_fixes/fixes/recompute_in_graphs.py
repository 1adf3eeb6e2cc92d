"""``recompute-in-graphs``: what an activation recompute in a graph does to the scales of delayed scaling is left out.

Upstream: open, TE 2.10 to main

Symptom: `te.checkpoint` in a captured module, delayed scaling, behind a module in the same autocast that has no
backward, or in an autocast inside another that is off: scales of the backward or of the forward stay as they were, in
the second case all of them (outputs and gradients off by 2.7 on the simulator). Weights cached, and another graph's
first microbatch between forward and backward: the recomputation quantizes its weights (gradients off by 0.08).

A recomputation has an autocast of its own, and updates the scales of the forward as it leaves it; the first module in
it updates those of the backward. The former is captured, with the modules that happen to be registered then; the latter
is left to whichever graph is the first of an autocast. Both are now done after each replay of such a backward, and
before it the skip flag, which all graphs share, is that of its own forward. Other captures than TE's own, as those of
`torch.cuda.graph` or Megatron-Core, keep the update: nothing else does it at their replays.

``not-needed``: all of the changes below stand where they would be made. ``not-applicable``: graphed callables have no
``backward_dw``, as before TE 2.10.
"""

from __future__ import annotations

from ..fix import Fix, Verdict, not_applicable
from ..shapes import BACKWARD_CAPTURE, Changes, graph_capture, lacks_delayed_wgrads, skip_flag_state, start_of_warmup
from ..source import Source

UPDATE = "cls.reduce_and_update_fp8_tensors(forward=True)"
LEAVE_OUT = """
if hasattr(cls, "update_in_capture"):
    # A recomputation in a graph: each replay of its backward will do it.
    cls.update_in_capture = True
    return
"""

BEGIN = """
flag_of_graphs = {state}.skip_fp8_weight_update_tensor
recomputing_graphs = set()
@contextlib.contextmanager
def updates_left_out(bwd_graph):
    FP8GlobalStateManager.update_in_capture = False
    try:
        yield
        if FP8GlobalStateManager.update_in_capture:
            recomputing_graphs.add(bwd_graph)
    finally:
        del FP8GlobalStateManager.update_in_capture

"""

KEEP = "ctx.skips_update = skip_fp8_weight_update"
SET_FLAG = """
if recomputes and isinstance(ctx.skips_update, bool):
    # Another graph may have set the flag since the forward.
    flag_of_graphs.fill_(ctx.skips_update)
"""

RECOMPUTES = "bwd_graphs[i] in recomputing_graphs"
FIRST = "if ctx.is_first_module: FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)"
FIRST_OR_RECOMPUTED = """
if recomputes:
    FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)
if ctx.is_first_module or recomputes:
    FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
"""


def examine(source: Source) -> Verdict:
    if lacks_delayed_wgrads(source):
        return not_applicable("TE before 2.10, without graphs of delayed weight gradients, is not covered")
    quantization = source.module("transformer_engine.pytorch.quantization")
    leave = quantization.definition("FP8GlobalStateManager.autocast_exit")
    capture = graph_capture(source)
    forward, backward = map(
        capture.inner("make_graphed_autograd_function").inner("Graphed").inner, ("forward", "backward")
    )
    changes = Changes()
    changes.before(leave, [leave.one(UPDATE)], LEAVE_OUT)
    changes.before(capture, [start_of_warmup(capture)], BEGIN.format(state=skip_flag_state(source)))
    changes.enter(capture, BACKWARD_CAPTURE, "updates_left_out(bwd_graph)", 2)
    changes.graph_argument(capture, RECOMPUTES, "recomputes")
    changes.first(forward, KEEP)
    changes.first(backward, SET_FLAG)
    changes.replace(backward, FIRST, FIRST_OR_RECOMPUTED)
    return changes.verdict(
        "a recomputation's update of scales is captured or left out", "a replay updates scales as a recomputation does"
    )


FIX = Fix(
    id="recompute-in-graphs",
    summary="what a recompute in a graph does to the scales of delayed scaling is left out",
    symptom="te.checkpoint in a graph, delayed scaling, behind a module without a backward: scales stay as they were",
    upstream=(),
    affected=">=2.10",
    examine=examine,
    looks_like=("fp8 gradient",),
)
