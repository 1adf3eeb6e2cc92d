"""Bug: graphs accept, without an error, arguments that differ from the sample arguments.

Upstream: none yet, TE 2.10 to main

A replay flattens its arguments and copies them into the static inputs by position. If a positional sample argument is
passed as a keyword, or an argument is missing, the first *weight* is used as an input. If the keys of a dict are in
another order, its tensors are mixed up. Inputs of another shape are broadcast. A number, a string or an object keeps
the value of the capture. A keyword that is not among the sample arguments is ignored, although it may be a tensor or
hold tensors (Megatron's ``packed_seq_params``). An output that its module detaches needs a gradient. The gradient of an
FP8 output (``fp8_output=True``) is quantized, and in delayed scaling an FP8 input is quantized twice.

With the fix, an output needs a gradient only if it needed one in the capture. The other cases raise `TypeError` or
`ValueError`, and so does an input that needs a gradient although its sample argument needed none. A backward through a
forward-only graph raises `RuntimeError` (docs/limits.md).

Inputs of another dtype are cast, with one warning except under `torch.autocast`, because an eager module computes other
numbers from an fp32 input than from a bf16 input (relative error 0.002). An ignored keyword raises no error if it holds
no tensor, such as ``is_first_microbatch``, or if the bytecode of the forward never loads it. If a layer with its own
`__call__` was captured without keywords, an ignored tensor causes only one warning, because Megatron passes its mask to
such layers. Before an error about a smaller tensor, such as a mask, or about an input that needs a gradient, the first
such replay runs the eager forward without FP8, and raises no error if the difference is harmless."""

from ..fix import Fix
from .shapes import REPLAY_STEPS

PATCH = """
@@ graph.py _make_graphed_callables
+from ._te_replay_arguments import SampleArguments, mark_outputs, refuse_quantized_outputs
+
 visited_te_modules = ANY_EMPTY
@@ (2 times)
 flatten_outputs, spec = _tree_flatten(outputs)
+if is_training:
+    refuse_quantized_outputs(func, flatten_outputs, _reuse_graph_input_output_buffers)
@@
+sample_arguments = SampleArguments(
+    graph_callables[i], sample_args[i], sample_kwargs[i], per_callable_kwargs_keys[i], is_training
+)
+replays[i].add("forward check", "compare arguments", sample_arguments.check)
+mark_outputs(replays[i], sample_arguments, per_callable_static_grad_outputs[i])
 ANY_GRAPHED = make_graphed_autograd_function(..., fwd_graphs[i], ...)

@@ graph.py _make_graphed_callables.make_graphed_autograd_function
+from ._te_replay_arguments import refuse_backward
+
+if not is_training or all(grad is None for grad in static_grad_outputs):
+    replay.add("backward check", "require captured backward", refuse_backward)
 class Graphed(torch.autograd.Function):
     ...
"""

FIX = Fix(
    symptom="graphed(inp=x) uses a weight instead of x, and a dict with its keys in another order mixes up its tensors",
    group="replay preconditions",
    affects="programs that call a graph with arguments that differ from its sample arguments",
    cost="3 µs of CPU time for each call, 9 µs with a dict of tensors",
    patch=REPLAY_STEPS + PATCH,
)
