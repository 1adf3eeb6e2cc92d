"""Bug: if a graph recomputes activations, its replays miss updates of FP8 scales.

Upstream: none yet, TE 2.10 to main

A recomputation enters an autocast. The end of this autocast updates the scales of the forward, and the backward of its
first module updates the scales of the backward. A capture records the first update for all modules registered at that
time, so after eager runs it also contains updates of other modules' scales. TE omits the second update unless the graph
comes first in its autocast. This update is therefore missing after a module without a backward, and in an autocast
inside a disabled autocast.

With the fix, warmup and capture omit both updates, and each replay of such a backward performs both. A replay inside an
autocast of the program performs only the updates of an eager backward inside this autocast. The backward also gets the
skip flag of its own forward. Otherwise it would quantize weights again after the first microbatch of another graph.
Captures by `torch.cuda.graph` or Megatron-Core, and other threads, still perform the updates themselves.
"""

from ..fix import Fix
from .shapes import REPLAY_STEPS, SKIP_FLAG

PATCH = """
@@ quantization.py FP8GlobalStateManager.autocast_exit
+updates = getattr(cls, "updates_of_capture", None)
+if updates and updates.leave_to_replays("forward"):
+    return  # A recomputation in a graph: each replay of its backward updates the scales.
 cls.reduce_and_update_fp8_tensors(forward=True)

@@ quantization.py FP8GlobalStateManager.is_first_fp8_module
 ANY_FIRST = ANY_FLAG
 ANY_FLAG = False
+updates = getattr(cls, "updates_of_capture", None)
+if ANY_FIRST and updates:
+    updates.leave_to_replays("backward")

@@ graph.py _make_graphed_callables
+from ._te_recompute_in_graphs import updates_left_to_replays
+
 visited_te_modules = ANY_EMPTY
@@
-with ..., torch.cuda.stream(ANY):
+with ..., torch.cuda.stream(ANY), updates_left_to_replays():
     ...
@@ (2 times)
-with ..., _graph_context_wrapper(bwd_graph, ...):
+with ..., _graph_context_wrapper(bwd_graph, ...), updates_left_to_replays(replays.of(bwd_graph)):
     ...
"""

FIX = Fix(
    symptom="te.checkpoint inside a graph, delayed scaling: some FP8 scales are never updated",
    group="FP8 state",
    affects="DelayedScaling (Megatron --fp8-recipe delayed), te.checkpoint in captured modules (--recompute-modules)",
    patch=REPLAY_STEPS + SKIP_FLAG + PATCH,
    requires=("fp8-state-at-replay",),
    after=("backward-dw-order",),
    check_hints=("fp8 gradient",),
)
