"""``leaf-grad-lifetime``: the grads that a graph returns for leaf inputs are overwritten by the next replay.

Upstream: none yet, TE 2.10 to main

`Graphed.backward` returns the graph's static buffers, and autograd adopts that of a leaf as its ``.grad``. So an input
that is a leaf accumulates the last microbatch's gradient over and over. It is now returned as a copy. Grads of other
inputs are read at once, and stay the buffers.
"""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables
+from ._te_leaf_grads import leaf_inputs, with_copied_grads
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
    symptom="a parameter that is passed as an input gets the last microbatch's gradient several times",
    group="gradients",
    affects="parameters, or other leaves that need a gradient, among a callable's inputs, as in NeMo Automodel 0.7.0",
    cost="the gradients of inputs that are leaves are copied; not measured",
    patch=PATCH,
    provides=("leaf_grads",),
    check_hints=("use overwritten",),
)
