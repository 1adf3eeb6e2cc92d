"""Bug: a capture records delayed wgrads out of order, or with another microbatch's inputs.

Upstream: https://github.com/NVIDIA/TransformerEngine/pull/2376 (TE 2.11) accepts wgrads in ``_order``.
The other parts of the bug are open.

To find the microbatch of a wgrad, `_make_graphed_callables` counts the dgrads before it instead of the wgrads. The
``_order`` ``[1,-1.5,-1]`` therefore raises ``KeyError: -1``, and ``[1,1,-1,-1,-1.5,-1.5]`` raises "already owns a
captured graph". TE also reuses the static inputs and the grad-output buffer of a microbatch after its dgrad, although
its wgrad reads them later. So ``[1,-1,1,-1.5,-1,-1.5]`` computes wrong numbers without an error.

The fix plans the microbatch and the buffers of each capture from the schedule. Illegal schedules raise an error
(docs/maintainers/schedules.md). Delayed wgrads that ``_order`` does not contain are captured right after their dgrads,
as in TE 2.10.
"""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables
+from ._te_graph_order import Plan, parse
+
+_order_entries = parse(_order)
 _order_without_wgrad = []
@@ (or)
+from ._te_graph_order import Plan, parse
+
+_order_entries = parse(_order)
 num_model_chunks = max(_order)
-num_microbatches = len(_order) // num_model_chunks // 2
-assert num_model_chunks * num_microbatches * 2 == len(_order)
+num_microbatches = _order.count(1)
@@
 for m_chunk in range(num_model_chunks):
     num_layers = _num_layers_per_chunk[m_chunk]
     _prefix_num_layers.append(ANY)
+_order_plan = Plan(_order_entries, _num_layers_per_chunk)
+if _order_plan.delayed:
+    sample_args, sample_kwargs = _order_plan.assign_inputs(
+        sample_args,
+        sample_kwargs,
+        reuse=_reuse_graph_input_output_buffers,
+        flatten=_tree_flatten,
+        unflatten=_tree_unflatten,
+    )
@@
 consumed_sample_q = {}
 fwd_idx = [0] * num_model_chunks
-for c_id in _order:
+for c_id in () if _order_plan.delayed else _order:
     ...
@@
 for i, c_id in enumerate(_order):
     ...
@@ (or)
 previous_chunk_last_callable_bwd_idx = None
-for c_id in _order:
+for i, c_id in enumerate(_order):
     ...
     if c_id > 0:
         ...
     else:
-        m_chunk = -c_id - 1
+        m_chunk = _order_plan.entries[i].chunk
         ...
@@
 previous_per_callable_bwd_idx = None
-for l_no in list(reversed(range(_num_layers_per_chunk[m_chunk]))):
+for l_no, is_wgrad in _order_plan.backward(i, need_bwd_dw_graph):
     ...
-    per_callable_bwd_idx = (_prefix_num_layers[m_chunk] * num_microbatches) + (
-        bwd_idx[m_chunk] * _num_layers_per_chunk[m_chunk] + l_no
-    )
+    per_callable_bwd_idx = _order_plan.index(i, l_no)
     ...
@@
 static_grad_outputs_keys = ANY_KEYS
+if not is_wgrad:
+    static_grad_outputs_keys = _order_plan.grad_output(i, static_grad_outputs_keys)
@@
-if ceil(c_id) == c_id and need_bwd_dw_graph[per_callable_bwd_idx]:
-    if wgrad_validation_list[i] is None:
-        ...
-elif ceil(c_id) != c_id:
+if is_wgrad:
-    per_callable_bwd_idx -= _num_layers_per_chunk[m_chunk]
     ...
     bwd_dw_graph = bwd_dw_graphs[per_callable_bwd_idx]
     ...
     continue
@@ (or)
 if is_training:
     ...
-    with _graph_context_wrapper(bwd_graph, ...):
+    with _graph_context_wrapper(bwd_graph, ...) if not is_wgrad else contextlib.nullcontext():
-        grad_inputs = ANY_GRADS
+        grad_inputs = ANY_GRADS if not is_wgrad else ()
     ...
-    if need_bwd_dw_graph[per_callable_bwd_idx]:
+    if is_wgrad:
         bwd_dw_graph = bwd_dw_graphs[per_callable_bwd_idx]
         ...
 ...
+if is_wgrad:
+    continue
 static_grad_inputs = []
@@
-assert ceil(c_id) - c_id == 0.5, ANY
@@ (or)
-if ceil(c_id) - c_id != 0.5: raise ValueError(ANY)
@@ (or, 0 times)
 _order_without_wgrad = []
"""

FIX = Fix(
    symptom="delayed wgrads: gradients of another microbatch, KeyError: -1, or 'already owns a captured graph'",
    group="pipelines and delayed wgrads",
    affects="Megatron --delay-wgrad-compute; programs that call backward_dw() or pass an _order with wgrads",
    requires=("capture-without-warmup",),
    patch=PATCH,
    check_hints=("wgrad .grad", "wgrad main_grad"),
)
