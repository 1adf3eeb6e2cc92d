"""Bug: layers that need different static buffers share one buffer.

Upstream: none yet, TE 2.10 to main

TE reuses the static inputs of another layer if shape, dtype and layout agree. If these inputs need no gradient, the
second layer returns no dgrad. If two inputs of the first layer are one tensor, the second layer's inputs overwrite each
other. With the fix, a buffer is reused only if all properties of both sample arguments agree, including type, device,
strides, whether a gradient is needed, and whether several tensors of a sample are the same tensor. Reused grad-output
buffers are assigned to the outputs of the second layer that need gradients, which may be at other positions than in the
first layer. For schedules with wgrads, the fix `backward-dw-order` plans the inputs.

Several samples may share a constant: a tensor without a gradient, such as a rotary table. If layers have different
tables, TE copies one over the other. With the fix, a constant is the static input of each sample that contains it.
"""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables
+from ._te_graph_order import find_constants, signatures
+
+# Inputs that several samples share, such as a rotary table. Nothing may be copied over them.
+constants = find_constants(
+    [*args, *(v for _, v in sorted(kwargs.items()))] for args, kwargs in zip(sample_args, sample_kwargs)
+)
 fwd_sample_qs = {}
@@
 sample_keys = sample_args_keys + sample_kwargs_keys
+# Samples share a static buffer only if these properties agree too.
+sample_kwargs_values = [v for _, v in sorted(sample_kwargs[per_callable_fwd_idx].items())]
+sample_keys += tuple(signatures([*sample_args[per_callable_fwd_idx], *sample_kwargs_values], constants))
 ...
 fwd_sample_qs[m_chunk].append((sample_keys, per_callable_fwd_idx))
 if consumed_sample_q.get(sample_keys, []):
     reuse_fwd_idx = consumed_sample_q[sample_keys].pop(0)
-    sample_args[per_callable_fwd_idx] = sample_args[reuse_fwd_idx]
-    sample_kwargs[per_callable_fwd_idx] = sample_kwargs[reuse_fwd_idx]
+    sample_args[per_callable_fwd_idx] = tuple(
+        own if own.data_ptr() in constants else reused
+        for own, reused in zip(sample_args[per_callable_fwd_idx], sample_args[reuse_fwd_idx])
+    )
+    sample_kwargs[per_callable_fwd_idx] = {
+        k: own if own.data_ptr() in constants else sample_kwargs[reuse_fwd_idx][k]
+        for k, own in sample_kwargs[per_callable_fwd_idx].items()
+    }
@@
+# The buffers may come from a layer in which other outputs need no gradient.
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
