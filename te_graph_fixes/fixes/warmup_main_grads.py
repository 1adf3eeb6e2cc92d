"""``warmup-main-grads``: warmup adds its wgrads to ``main_grad``, as if they were those of training.

Upstream: none yet, TE 2.10 to main (docs/maintainers/upstream/warmup-main-grads.md).

`make_graphed_callables` puts FP8 state and random numbers back after warmup, but not what the wgrads were added to.
In warmup all parameters now share the memory of the largest ``main_grad``, which gets its content back afterwards, also
where the warmup fails (`te_graph_fixes/shipped/main_grads.py`).
"""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables
+from ._te_main_grads import main_grads_kept
+
 visited_te_modules = ANY_EMPTY
@@
-with ..., torch.cuda.stream(ANY):
+with ..., torch.cuda.stream(ANY), main_grads_kept(callables if is_training else ()):
     ...
"""

FIX = Fix(
    symptom="a capture adds garbage to main_grad: the next step's fused wgrads start from random values, or NaN",
    group="gradients",
    affects="fused wgrads in training loops that zero main_grad only before the capture; Megatron zeroes it after",
    cost="host memory for the largest main_grad during warmup, where it is not zero",
    patch=PATCH,
    provides=("main_grads",),
)
