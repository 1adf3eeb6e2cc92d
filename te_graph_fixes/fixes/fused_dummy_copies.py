"""Bug: each replay copies parameter gradients that no code reads.

Upstream: none yet, TE 2.19 to main. https://github.com/NVIDIA/TransformerEngine/pull/2937 mentions the slowdown.
https://github.com/NVIDIA/Megatron-LM/pull/5893 turns all copies off in Megatron-LM, but no Megatron-Core release up to
0.19.2 contains it.

From TE 2.19 on, `Graphed.backward` copies every parameter gradient that it returns, except for delayed wgrads. With
the fix, TE's shared dummies for wgrads in ``main_grad`` are not copied. In a capture, `LayerNormMLP` returns these
dummies instead of its own dummies in graph memory. For TE before 2.19, `param-grad-lifetime` contains these changes.
"""

from ..fix import Fix
from .shapes import SHARED_DUMMIES

PATCH = """
@@ graph.py _make_graphed_callables
+from ._te_param_grad_lifetime import is_shared_dummy
 visited_te_modules = ANY_EMPTY
@@ graph.py _make_graphed_callables._returned_param_grad_clone_slots
 idx >= module_param_start and not getattr(ANY, "skip_backward_post_hook", ANY)
@@
-not getattr(ANY, "skip_backward_post_hook", ANY)
+not getattr(ANY, "skip_backward_post_hook", ANY) \
and not is_shared_dummy(static_grad_inputs[idx], module_params[idx - module_param_start])
"""

EARLIER = """
@@ graph.py make_graphed_callables (0 times)
 def make_graphed_callables(..., clone_param_grads_on_return=ANY, ...): ...
"""

FIX = Fix(
    symptom="fused wgrads: the backward takes about 20 % longer, and needs as much extra memory as the weights",
    group="speed",
    affects="fuse_wgrad_accumulation (Megatron, unless --no-gradient-accumulation-fusion)",
    since="2.19",
    patch=SHARED_DUMMIES + PATCH,
    absent=[(EARLIER, "TE before 2.19 copies no parameter grads")],
)
