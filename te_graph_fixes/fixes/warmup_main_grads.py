"""``warmup-main-grads``: warmup adds its wgrads to ``main_grad``, as if they were those of training.

Upstream: open, TE 2.7 to main (docs/upstream/warmup-main-grads.md).

Symptom: wgrads are fused into ``main_grad``, which is set to zero behind a step, or holds what earlier microbatches
gave; the capture is in between. The next step begins with the wgrads of warmup, whose output gradients are
uninitialised memory: anything, up to NaN. Right is what is not fused, or is set to zero after the capture.

`make_graphed_callables` puts FP8 state and random numbers back after warmup, but not what the wgrads were added to.
Each backward of warmup now leaves the ``main_grad`` of its callable as it was; until then there is a copy of it.

``not-needed``: all of the changes below stand where they would be made.
"""

from __future__ import annotations

from ..fix import Fix, Verdict
from ..shapes import Changes, graph_capture, lacks_delayed_wgrads, require_names, warmup_backward
from ..source import Source

KEEP = """
main_grads = [
    (parameter.main_grad, torch.clone(parameter.main_grad))
    for parameter in func.parameters()
    if getattr(parameter, "main_grad", None) is not None
]
"""

PUT_BACK = "for main_grad, kept in main_grads: main_grad.copy_(kept)"


def examine(source: Source) -> Verdict:
    capture = graph_capture(source)
    require_names(capture, "func")
    backward = warmup_backward(capture)
    delayed = backward if lacks_delayed_wgrads(source) else capture.one("need_bwd_dw_graph[func_idx] = ANY")
    changes = Changes()
    changes.before(capture, [backward], KEEP)
    changes.after(capture, [delayed], PUT_BACK)
    return changes.verdict("warmup adds its wgrads to main_grad", "warmup leaves main_grad as it was")


FIX = Fix(
    id="warmup-main-grads",
    summary="warmup adds its wgrads to main_grad, and the next step of training begins with them",
    symptom="main_grad set to zero before the capture: that step's fused wgrads are anything, up to NaN",
    upstream=(),
    affected=">=2.7",
    examine=examine,
)
