"""Bug: a replay does not set ``grad_added_to_main_grad``, the mark of a fused wgrad.

Upstream: none yet, reported as https://github.com/NVIDIA/TransformerEngine/issues/1204

An eager backward with a fused wgrad returns an uninitialized dummy and marks the weight, so that data-parallel wrappers
do not add the dummy to ``main_grad``. A replay runs no Python, so it does not set the mark. A wrapper that clears the
mark at each step adds the dummy from its second step on. With the fix, the capture records the weights marked by each
backward, and each replay marks them again.
"""

from ..fix import Fix
from .shapes import REPLAY_STEPS

PATCH = """
@@ graph.py _make_graphed_callables
+from ._te_grad_added_mark import record_marks
+
 visited_te_modules = ANY_EMPTY
@@ (2 times)
-with ..., _graph_context_wrapper(bwd_graph, ...):
+with ..., record_marks(replays.of(bwd_graph), static_input_surface), _graph_context_wrapper(bwd_graph, ...):
     ...
"""

FIX = Fix(
    symptom="fused wgrads are random values, or NaN, in a data-parallel wrapper that clears grad_added_to_main_grad",
    group="gradients",
    affects="fused wgrads with Megatron-FSDP, or Megatron's DDP without its cuda_graph_impl='transformer_engine'",
    patch=REPLAY_STEPS + PATCH,
    check_hints=("backward mark",),
)
