"""Bug: a grad input is overwritten while it is sent to the previous pipeline stage.

Upstream: https://github.com/NVIDIA/Megatron-LM/issues/5966 (open; probably this bug)

With ``_reuse_graph_input_output_buffers``, `_make_graphed_callables` returns a chunk's static grad input to the graph
memory pool after the capture of the next chunk's dgrad. By then Megatron-Core has waited for the send, unless every
layer is passed as a chunk (``--overlap-moe-expert-parallel-comm``). In this case, Megatron waits only after the
backward of the next *model* chunk. Graphs captured in between overwrite the buffer while a late stage receives it. With
the fix, the grad input of a model chunk's first layer is released at the entry of the schedule for which
`grad_input_releases` lists it. Other gradients are released as in TE.
"""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables
 previous_chunk_last_callable_bwd_idx = None
+if _reuse_graph_input_output_buffers:
+    from ._te_graph_order import grad_input_releases
+
+    released_grad_inputs = iter(grad_input_releases(_order, _num_layers_per_chunk))
 for ANY_ENTRY in ANY_ENTRIES:
+    if _reuse_graph_input_output_buffers:
+        for idx in next(released_grad_inputs):
+            per_callable_static_grad_inputs[idx] = make_weak_ref(per_callable_static_grad_inputs[idx])
     if c_id > 0:
         ...
     else:
         ...
@@ (at least once)
 per_callable_bwd_idx = (_prefix_num_layers[m_chunk] * num_microbatches) + (
     bwd_idx[m_chunk] * _num_layers_per_chunk[m_chunk] + l_no
 )
@@
 if l_no == 0:
     if previous_chunk_last_callable_bwd_idx is not None:
         idx = previous_chunk_last_callable_bwd_idx
-        per_callable_static_grad_inputs[idx] = make_weak_ref(per_callable_static_grad_inputs[idx])
+        # released_grad_inputs lists when the gradients of user inputs may be released.
+        num_user_args = per_callable_len_user_args[idx]
+        per_callable_static_grad_inputs[idx] = per_callable_static_grad_inputs[idx][
+            :num_user_args
+        ] + make_weak_ref(per_callable_static_grad_inputs[idx][num_user_args:])
     previous_chunk_last_callable_bwd_idx = per_callable_bwd_idx
"""

FIX = Fix(
    symptom="pipelines with EP overlap: a late stage receives wrong gradients, with norms of millions, or NaN",
    group="pipelines and delayed wgrads",
    affects="Megatron --overlap-moe-expert-parallel-comm with virtual pipeline stages of two or more layers",
    cost="memory for one more grad input in each model chunk",
    patch=PATCH,
    check_hints=("sent overwritten",),
)
