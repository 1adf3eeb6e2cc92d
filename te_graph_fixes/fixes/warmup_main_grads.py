"""``warmup-main-grads``: warmup adds its wgrads to ``main_grad``, as if they were those of training.

Upstream: none yet, TE 2.10 to main (docs/upstream/warmup-main-grads.md).

Symptom: wgrads are fused into ``main_grad``, which is set to zero behind a step, or holds what earlier microbatches
gave; the capture is in between. The next step begins with the wgrads of warmup, whose output gradients are
uninitialised memory: anything, up to NaN. Right is what is not fused, or is set to zero after the capture.

`make_graphed_callables` puts FP8 state and random numbers back after warmup, but not what the wgrads were added to.
Each backward of warmup now leaves the ``main_grad`` of its callable as it was; until then there is a copy of it.
"""

from ..fix import Fix
from ..patching.patch import SemanticPatch

KEEP = """
+main_grads = [
+    (parameter.main_grad, torch.clone(parameter.main_grad))
+    for parameter in func.parameters()
+    if getattr(parameter, "main_grad", None) is not None
+]"""
PATCH = f"""
@@ graph.py _make_graphed_callables{KEEP}
 with ..., _none_grad_context_wrapper(inputs, ...):
     ...
@@ (or){KEEP}
 grad_inputs = torch.autograd.grad(
     outputs=ANY_OUTPUTS,
     inputs=tuple(i for i in static_input_surface if i.requires_grad),
     grad_outputs=ANY_GRADS,
     only_inputs=True,
     allow_unused=allow_unused_input,
 )
"""
DELAYED = """
@@ graph.py _make_graphed_callables
 need_bwd_dw_graph[func_idx] = ANY
+for main_grad, kept in main_grads: main_grad.copy_(kept)
"""

FIX = Fix(
    symptom="a capture adds garbage to main_grad: the next step's fused wgrads start from random values, or NaN",
    group="gradients",
    users="fused wgrads in training loops that zero main_grad before the capture and not after it",
    cost="memory for the main_grad of one callable, while it warms up",
    examine=SemanticPatch(PATCH + DELAYED, "warmup adds its wgrads to main_grad"),
)
