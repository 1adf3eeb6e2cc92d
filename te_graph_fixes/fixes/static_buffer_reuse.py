"""``static-buffer-reuse``: layers with different static buffers share them.

Upstream: none yet, TE 2.10 to main

TE reuses the static inputs of another layer if shape, dtype and layout agree. If these inputs need no gradient, the
second layer returns no dgrad. If one tensor is both inputs of the first layer, the second layer's inputs overwrite each
other. With the fix, the key contains all properties that a buffer has from its sample argument: type, device, strides,
whether it needs a gradient, and which tensors of a sample are the same. Grad-output buffers are assigned to the outputs
of this layer that need gradients, which may be at other positions than in the first layer. (Inputs of wgrads:
`te_graph_fixes/shipped/graph_order.py`.)
"""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables
 sample_keys = sample_args_keys + sample_kwargs_keys
+# A static buffer also has these properties from its sample argument.
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
+# The buffers may come from a layer with other outputs that need no gradient.
+given_grad_outputs = iter([g for g in static_grad_outputs if g is not None])
+static_grad_outputs = tuple(
+    next(given_grad_outputs) if getattr(o, "requires_grad", False) else None for o in static_outputs
+)
 per_callable_static_grad_outputs[per_callable_bwd_idx] = static_grad_outputs
"""

FIX = Fix(
    symptom="mixed layer types in one pipeline schedule: wrong gradients (relative error 1.0) or outputs",
    group="pipelines and delayed wgrads",
    affects="_reuse_graph_input_output_buffers (Megatron sets it) with several kinds of layers, such as dense and MoE",
    patch=PATCH,
)
