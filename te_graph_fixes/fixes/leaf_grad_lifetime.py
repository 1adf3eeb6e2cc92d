"""Bug: the next replay overwrites the gradients that a graph returns for leaf inputs.

Upstream: none yet, TE 2.10 to main

`Graphed.backward` returns the graph's static buffers, and autograd uses the buffer of a leaf as its ``.grad``. So the
``.grad`` of a leaf input becomes a multiple of the last microbatch's gradient. With the fix, the gradients of leaves
are returned as copies. Other gradients are still returned without a copy, because autograd reads them immediately.
"""

from ..fix import Fix
from .shapes import REPLAY_STEPS

PATCH = """
@@ graph.py _make_graphed_callables.make_graphed_autograd_function
+from ._te_leaf_grad_lifetime import add_copies
+
+add_copies(replay, static_grad_inputs, len_user_args)
 class Graphed(torch.autograd.Function):
     ...
"""

FIX = Fix(
    symptom="the gradient of a parameter passed as an input is a multiple of the last microbatch's gradient",
    group="gradients",
    affects="parameters, or other leaves that need a gradient, among a callable's inputs, as in NeMo Automodel 0.7.0",
    cost="a copy of each gradient of a leaf input; not measured",
    patch=REPLAY_STEPS + PATCH,
    check_hints=("use overwritten",),
)
