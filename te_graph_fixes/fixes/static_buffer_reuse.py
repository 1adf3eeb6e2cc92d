"""``static-buffer-reuse``: static buffers are handed on between layers whose buffers differ.

Upstream: none yet, TE 2.10 to main

Inputs are handed on by shape, dtype and layout alone. A layer gets the input buffer of one whose input needs no
gradient, and its backward ends there; or that of a layer whose two inputs were one tensor. Their key now holds all that
a buffer keeps of its sample: type, device, strides, whether it needs a gradient, and which tensors of a sample are the
same. Buffers of grad outputs are put where this layer has outputs with gradients, which need not be where another layer
with as many has them. (Inputs of wgrads: `te_graph_fixes/shipped/graph_order.py`.)
"""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables
 sample_keys = sample_args_keys + sample_kwargs_keys
+# Nor may a buffer differ in anything else that it keeps of its sample.
+sample_kwargs_values = [v for _, v in sorted(sample_kwargs[per_callable_fwd_idx].items())]
+sample_tensors = [*sample_args[per_callable_fwd_idx], *sample_kwargs_values]
+sample_addresses = [t.data_ptr() for t in sample_tensors]
+sample_keys += tuple(
+    (type(t), t.device, t.stride(), t.requires_grad, sample_addresses.index(t.data_ptr()))
+    for t in sample_tensors
+)
 ...
 fwd_sample_qs[m_chunk].append((sample_keys, per_callable_fwd_idx))
 if consumed_sample_q.get(sample_keys, []):
     reuse_fwd_idx = consumed_sample_q[sample_keys].pop(0)
     ...
@@
+# They may have been made for a layer whose outputs without a gradient are at other places.
+given_grad_outputs = iter([g for g in static_grad_outputs if g is not None])
+static_grad_outputs = tuple(
+    next(given_grad_outputs) if getattr(o, "requires_grad", False) else None for o in static_outputs
+)
 per_callable_static_grad_outputs[per_callable_bwd_idx] = static_grad_outputs
"""

FIX = Fix(
    symptom="mixed layer types in one pipeline order: gradients off by 1.0, or wrong outputs",
    group="pipelines and delayed wgrads",
    affects="_reuse_graph_input_output_buffers (Megatron sets it) with layers of several kinds, as dense and MoE",
    patch=PATCH,
)
