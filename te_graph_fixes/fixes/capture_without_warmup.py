"""``capture-without-warmup``: with ``num_warmup_iters=0`` nobody knows which modules a graph runs.

Upstream: open, TE 2.10 to main

Symptom: ``make_graphed_callables(..., num_warmup_iters=0)`` with an ``_order``: scales of delayed scaling never change
(0.69 on the simulator), delayed wgrads are never delivered (1.0). With delayed wgrads and no ``_order``: ``KeyError``.

TE learns from forward hooks in the warmup which of its modules a callable runs, and from its backward which parameters
get gradients. Without a warmup nothing is known, and taken to be none. One iteration is run now at least.

``not-needed``: the warmup's range is `ONE`, and `NONE` is nowhere. ``not-applicable``: graphed callables have no
``backward_dw``, as before TE 2.10.
"""

from __future__ import annotations

from ..fix import Fix, Verdict, not_applicable
from ..shapes import Changes, graph_capture, lacks_delayed_wgrads, require_names
from ..source import Source

LEARNS = "visited_te_modules = {}"
NONE, ONE = "range(num_warmup_iters)", "range(max(num_warmup_iters, 1))"


def examine(source: Source) -> Verdict:
    if lacks_delayed_wgrads(source):
        return not_applicable("TE before 2.10, without graphs of delayed weight gradients, is not covered")
    capture = graph_capture(source)
    require_names(capture, "num_warmup_iters")
    capture.one(LEARNS)
    capture.one(*(f"for ANY_ITERATION in {iterations}: ..." for iterations in (NONE, ONE)))
    changes = Changes()
    changes.replace(capture, NONE, ONE)
    return changes.verdict("there may be no warmup to learn from", "there is always a warmup to learn from")


FIX = Fix(
    id="capture-without-warmup",
    summary="with num_warmup_iters=0 nobody knows which modules a graph runs",
    symptom="num_warmup_iters=0: scales of delayed scaling never change, delayed wgrads are missing, KeyError",
    upstream=(),
    affected=">=2.10",
    examine=examine,
)
