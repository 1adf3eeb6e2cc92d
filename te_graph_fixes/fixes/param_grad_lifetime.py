"""Bug: the next replay overwrites the parameter gradients that a graph returns.

Upstream: https://github.com/NVIDIA/TransformerEngine/pull/2937 (TE 2.19)

`Graphed.backward` returns the graph's static buffers, and autograd uses them as ``.grad``. The next replay therefore
overwrites ``.grad``, and also a gradient that a hook has stored. With the fix, `Graphed.backward` returns copies of
parameter gradients. One kernel copies the vectors (biases, norm weights) of a dtype. Gradients of user inputs are not
copied. TE's shared dummies for wgrads in ``main_grad`` are not copied either, because they are outside graph memory. In
a capture, `LayerNormMLP` returns these dummies instead of its own dummies.
"""

from ..fix import Fix
from .shapes import SHARED_DUMMIES

PATCH = """
@@ graph.py _make_graphed_callables.make_graphed_autograd_function
+from ._te_param_grad_lifetime import ReturnedGrads, is_shared_dummy
+
+# Copy the gradients of parameters, except dummies for wgrads in main_grad.
+is_copied = tuple(
+    index >= len_user_args
+    and not is_shared_dummy(static_grad_inputs[index], static_input_surface[index])
+    for index in range(len(static_grad_inputs))
+)
+returned_grads = ReturnedGrads(static_grad_inputs, is_copied)
+
 class Graphed(torch.autograd.Function):
     ...
@@ graph.py _make_graphed_callables.make_graphed_autograd_function.Graphed
-tuple(b.detach() if b is not None else b for b in static_grad_inputs)
+returned_grads()
"""

UPSTREAM = """
@@ graph.py make_graphed_callables
 def make_graphed_callables(..., clone_param_grads_on_return=True, ...): ...

@@ graph.py _make_graphed_callables.make_graphed_autograd_function.Graphed
 for idx, grad_input in enumerate(static_grad_inputs):
     if grad_input is None:
         grad_inputs.append(ANY)
     elif returned_param_grad_clone_slots[idx]:
         grad_inputs.append(grad_input.detach().clone())
     else:
         grad_inputs.append(ANY)
"""

FIX = Fix(
    symptom="gradients in .grad of parameters are wrong (relative error 1.0 with three microbatches, often inf)",
    group="gradients",
    affects="several microbatches with gradients in .grad: unfused wgrads, or biases and norm weights",
    merged="2.19",
    cost="copies of unfused gradients: 3 µs of GPU time a replay for biases and norm weights, one kernel for each "
    "unfused wgrad",
    patch=SHARED_DUMMIES + PATCH,
    corrected=[(UPSTREAM, "parameter grads are returned as copies")],
    check_hints=("use overwritten",),
)
