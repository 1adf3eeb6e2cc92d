"""``wgrad-without-dgrad``: no backward reaches a graph whose inputs need no gradient, nor its delayed wgrads.

Upstream: none yet, TE 2.10 to main

Symptom: a layer that delays its wgrads, without bias or norm, is the first one and gets plain data. The output of its
graph needs no gradient: a ``RuntimeError`` in `backward`, or, in front of other layers, a wgrad graph that is replayed
without its dgrad graph (silent; inf on the simulator).

The autograd function of a graph takes those parameters whose gradients the warmup's backward gives, and a delayed wgrad
is none of these. Where nothing is left, while the callable's outputs need a gradient, an empty tensor is taken instead.
"""

from ..fix import Fix
from ..patching.patch import SemanticPatch

PATCH = """
@@ graph.py _make_graphed_callables
+if not module_params_with_grad and not num_required_grad_sample_args:
+    if any(getattr(output, "requires_grad", False) for output in outputs):
+        module_params_with_grad.append(torch.empty(0, device="cuda", requires_grad=True))
 if len(module_params_with_grad) != len(per_callable_module_params[func_idx]):
     ...
"""

FIX = Fix(
    symptom="a first layer with delayed wgrads and without bias: RuntimeError in backward, or wrong wgrads",
    group="pipelines and delayed wgrads",
    users="delay_wgrad_compute in a first layer whose input needs no gradient",
    examine=SemanticPatch(PATCH, "only parameters with gradients lead a backward to a graph"),
)
