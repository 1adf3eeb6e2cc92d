"""``wgrad-without-dgrad``: no backward reaches a graph whose inputs need no gradient, nor its delayed wgrads.

Upstream: none yet, TE 2.10 to main

The autograd function of a graph receives the parameters with a gradient from the warmup's backward. Delayed wgrads are
not among these gradients. A first layer with plain data and without bias or norm then has no input that needs a
gradient. Its output needs none either, or, before other layers, its wgrad graph is replayed without its dgrad graph.
With the fix, the function receives an empty tensor that needs a gradient, if the callable's outputs do. A callable with
a single parameter passes this parameter on anyway.
"""

from ..fix import Fix

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
    affects="delay_wgrad_compute (Megatron --delay-wgrad-compute) in a first layer whose input needs no gradient",
    patch=PATCH,
)
