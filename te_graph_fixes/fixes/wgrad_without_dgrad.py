"""Bug: no backward reaches a graph that computes only delayed wgrads, if its inputs need no gradient.

Upstream: none yet, TE 2.10 to main

The autograd function of a graph receives the parameters that got a gradient in the backward of the warmup. Delayed
wgrads are not among these gradients. If a first layer has no bias or norm, and its input needs no gradient, the
function has no input that needs a gradient. Its output then needs no gradient either. If other layers follow, the wgrad
graph of the first layer is replayed without its dgrad graph. With the fix, if the outputs need a gradient, the function
receives an empty tensor that needs a gradient. A callable with delayed wgrads receives this tensor even if its sample
arguments need a gradient, because the inputs of a replay may need no gradient. A callable with a single parameter does
not need this tensor, because its parameter is always an input of the function.
"""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables
+delays_wgrad = any(getattr(m, "need_backward_dw", bool)() for m in getattr(func, "modules", tuple)())
+if not module_params_with_grad and (delays_wgrad or not num_required_grad_sample_args):
+    if any(getattr(output, "requires_grad", False) for output in outputs):
+        module_params_with_grad.append(torch.empty(0, device="cuda", requires_grad=True))
 if len(module_params_with_grad) != len(per_callable_module_params[func_idx]):
     ...
"""

FIX = Fix(
    symptom="a first layer with delayed wgrads and without bias: RuntimeError in backward, or wrong wgrads",
    group="pipelines and delayed wgrads",
    affects="delay_wgrad_compute (Megatron --delay-wgrad-compute) in a first layer whose input needs no gradient",
    patch=PATCH,
)
