"""``grad-input-lifetime``: a grad input is overwritten while it is still being sent to the previous pipeline stage.

Upstream: https://github.com/NVIDIA/Megatron-LM/issues/5966 (open; that this is its cause is inference)

With ``_reuse_graph_input_output_buffers``, `_make_graphed_callables` gives a chunk's static grad input back to the
graph pool once the next chunk's dgrad is captured, for by then Megatron-Core has waited for the send. Where every layer
is passed as a chunk (``--overlap-moe-expert-parallel-comm``), Megatron waits only after the next *model* chunk's
backward, and graphs captured in between write into the buffer while a stage that is some milliseconds late receives it.
The gradients of the caller's inputs are released where `grad_input_releases` says instead; those of parameters stay
with TE's rule.
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
+        # Of the inputs' grads, released_grad_inputs says when they have been read.
+        num_user_args = per_callable_len_user_args[idx]
+        per_callable_static_grad_inputs[idx] = per_callable_static_grad_inputs[idx][
+            :num_user_args
+        ] + make_weak_ref(per_callable_static_grad_inputs[idx][num_user_args:])
     previous_chunk_last_callable_bwd_idx = per_callable_bwd_idx
"""

FIX = Fix(
    symptom="pipelines with EP overlap: a late stage receives garbage, NaN or gradient norms of millions",
    group="pipelines and delayed wgrads",
    affects="Megatron --overlap-moe-expert-parallel-comm with virtual pipeline stages of two or more layers",
    cost="a grad input for each layer of a model chunk but one: 0.4 to 0.9 % of the memory",
    patch=PATCH,
    provides=("graph_order",),
    check_hints=("sent overwritten",),
)
