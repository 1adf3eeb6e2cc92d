"""``capture-without-warmup``: with ``num_warmup_iters=0`` it is not known which modules a graph runs.

Upstream: none yet, TE 2.10 to main

TE learns from forward hooks in the warmup which of its modules a callable runs, and from its backward which parameters
get gradients. Without a warmup nothing is known, and taken to be none. At least one iteration is run now.
"""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables
 visited_te_modules = {}
@@
-for ANY_ITERATION in range(num_warmup_iters):
+for ANY_ITERATION in range(max(num_warmup_iters, 1)):
     ...
"""

FIX = Fix(
    symptom="a capture for training with num_warmup_iters=0 stops with KeyError",
    group="crashes",
    affects="own callers of make_graphed_callables(num_warmup_iters=0)",
    cost="one warmup iteration, where none was asked for",
    patch=PATCH,
)
