"""``leaf-grad-lifetime``: the next replay overwrites the gradients that a graph returns for leaf inputs.

Upstream: none yet, TE 2.10 to main

`Graphed.backward` returns the graph's static buffers, and autograd uses the buffer of a leaf as its ``.grad``. So the
``.grad`` of a leaf input becomes a multiple of the last microbatch's gradient. With the fix, the gradients of leaves
are returned as copies. Other gradients are still returned without a copy, because autograd reads them immediately.
"""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables
+from ._te_leaf_grad_lifetime import leaf_inputs, with_copied_grads
+
 visited_te_modules = ANY_EMPTY
@@ graph.py _make_graphed_callables.make_graphed_autograd_function.Graphed.forward (at its start)
+ctx.inputs_with_copied_grads = leaf_inputs(inputs, len_user_args)
@@ graph.py _make_graphed_callables.make_graphed_autograd_function
 class Graphed(torch.autograd.Function):
     ...
+Graphed.backward = staticmethod(with_copied_grads(Graphed.backward, len(static_grad_inputs)))
"""

FIX = Fix(
    symptom="the gradient of a parameter passed as an input is a multiple of the last microbatch's gradient",
    group="gradients",
    affects="parameters, or other leaves that need a gradient, among a callable's inputs, as in NeMo Automodel 0.7.0",
    cost="a copy of each gradient of a leaf input; not measured",
    patch=PATCH,
    check_hints=("use overwritten",),
)
