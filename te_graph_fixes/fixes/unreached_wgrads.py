"""``unreached-wgrads``: no backward reaches a graph whose inputs need no gradient, nor its delayed wgrads.

Upstream: open, TE 2.10 to main

Symptom: a layer that delays its wgrads, without bias or norm, is the first one and gets plain data. The output of its
graph needs no gradient: a ``RuntimeError`` in `backward`, or, in front of other layers, a wgrad graph that is replayed
without its dgrad graph (silent; inf on the simulator).

The autograd function of a graph takes those parameters whose gradients the warmup's backward gives, and a delayed wgrad
is none of these. Where nothing is left, while the callable's outputs need a gradient, an empty tensor is taken instead.

``not-needed``: all of the changes below stand where they would be made. ``not-applicable``: graphed callables have no
``backward_dw``, as before TE 2.10.
"""

from __future__ import annotations

from ..fix import Fix, Verdict, not_applicable
from ..shapes import Changes, graph_capture, lacks_delayed_wgrads, require_names
from ..source import Source

FILTERED = """
if len(module_params_with_grad) != len(per_callable_module_params[func_idx]):
    ...
"""

REACHED = """
if not module_params_with_grad and not num_required_grad_sample_args:
    if any(getattr(output, "requires_grad", False) for output in outputs):
        module_params_with_grad.append(torch.empty(0, device="cuda", requires_grad=True))
"""


def examine(source: Source) -> Verdict:
    if lacks_delayed_wgrads(source):
        return not_applicable("TE before 2.10, without graphs of delayed weight gradients, is not covered")
    capture = graph_capture(source)
    require_names(capture, "num_required_grad_sample_args", "outputs")
    changes = Changes()
    changes.before(capture, [capture.one(FILTERED)], REACHED)
    return changes.verdict(
        "only parameters with gradients lead a backward to a graph", "a backward reaches every graph that needs one"
    )


FIX = Fix(
    id="unreached-wgrads",
    summary="no backward reaches a graph whose inputs need no gradient, nor its delayed wgrads",
    symptom="a first layer with delayed wgrads and without bias: RuntimeError in backward, or wgrads that are wrong",
    upstream=(),
    affected=">=2.10",
    examine=examine,
)
