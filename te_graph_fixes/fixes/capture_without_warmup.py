"""``capture-without-warmup``: with ``num_warmup_iters=0`` nobody knows which modules a graph runs.

Upstream: none yet, TE 2.10 to main

Symptom: ``make_graphed_callables(..., num_warmup_iters=0)`` with an ``_order``: scales of delayed scaling never change
(0.69 on the simulator), delayed wgrads are never delivered (1.0). With delayed wgrads and no ``_order``: ``KeyError``.

TE learns from forward hooks in the warmup which of its modules a callable runs, and from its backward which parameters
get gradients. Without a warmup nothing is known, and taken to be none. One iteration is run now at least.
"""

from ..fix import Fix
from ..patch import SemanticPatch

PATCH = """
@@ graph.py _make_graphed_callables
 visited_te_modules = {}
@@
-for ANY_ITERATION in range(num_warmup_iters):
+for ANY_ITERATION in range(max(num_warmup_iters, 1)):
     ...
"""

FIX = Fix(
    symptom="num_warmup_iters=0: FP8 scales never change, delayed wgrads are missing, or KeyError",
    group="FP8 state",
    users="make_graphed_callables(num_warmup_iters=0)",
    cost="one warmup iteration, where none was asked for",
    examine=SemanticPatch(PATCH, "num_warmup_iters=0 runs no warmup, which would show the modules of a graph"),
)
