"""``backward-dw-order``: delayed weight gradients are captured, or fed, out of order.

Upstream: https://github.com/NVIDIA/TransformerEngine/pull/2376 (TE 2.11) lets ``_order`` hold wgrads; the rest is open.

Symptom, by order: wrong weight gradients without an error (``[1,-1,1,-1.5,-1,-1.5]``), "already owns a captured graph"
(``[1,1,-1,-1,-1.5,-1.5]``), ``KeyError: -1`` (``[1,-1.5,-1]``), ``AssertionError`` (TE 2.10, any).

`_make_graphed_callables` numbers a wgrad by the dgrads before it instead of the wgrads. It hands a microbatch's static
inputs and grad-output buffer on at its dgrad, although its wgrad reads them later. A plan made from the order now
says where a capture stands and which buffers it uses, and refuses illegal orders.
Delayed wgrads that an order does not name are captured right after their dgrad, as in TE 2.10.
"""

import ast
import textwrap
from typing import cast

from ..fix import Fix, Verdict, applicable
from ..patching.patch import edits
from ..patching.source import Definition, Edit, Source
from ..shipped import new_module
from .shapes import graph_capture

PLAN = """
+from ._te_graph_order import make_plan
+
+_order_plan = make_plan(
+    _order,
+    _num_layers_per_chunk,
+    callables=len(callables),
+    sample_args=len(sample_args),
+    sample_kwargs=len(sample_kwargs),
+    training=is_training,
+)
+_order, _num_layers_per_chunk = _order_plan.order, _order_plan.layers
+if _order_plan.delayed:
+    sample_args, sample_kwargs = _order_plan.assign_inputs(
+        sample_args,
+        sample_kwargs,
+        reuse=_reuse_graph_input_output_buffers,
+        flatten=_tree_flatten,
+        unflatten=_tree_unflatten,
+    )
"""

PATCH = """
@@ graph.py _make_graphed_callables
 fwd_sample_qs = {}
 consumed_sample_q = {}
 fwd_idx = [0] * num_model_chunks
-for c_id in _order:
+for c_id in () if _order_plan.delayed else _order:
     m_chunk = ANY_CHUNK
     if c_id > 0:
         ...
     else:
         ...
@@
 reuse_fwd_idx = ANY_SAMPLE
@@
 if static_grad_outputs_keys in static_grad_outputs_dict:
     static_grad_outputs = static_grad_outputs_dict[static_grad_outputs_keys]
 else:
     static_grad_outputs = ANY_BUFFERS
     static_grad_outputs_dict[static_grad_outputs_keys] = static_grad_outputs
@@
 for LOOP:
     ...
     if c_id > 0:
         ...
     else:
         m_chunk = CHUNK
         previous_per_callable_bwd_idx = None
-        for l_no in list(reversed(range(_num_layers_per_chunk[m_chunk]))):
+        for l_no, is_wgrad in _order_plan.backward(i, need_bwd_dw_graph):
             ...
-            per_callable_bwd_idx = (_prefix_num_layers[m_chunk] * num_microbatches) + (
-                bwd_idx[m_chunk] * _num_layers_per_chunk[m_chunk] + l_no
-            )
+            per_callable_bwd_idx = _order_plan.index(i, l_no)
             ...
         ...
"""

CHOICE = "static_grad_outputs_keys = _order_plan.grad_output(i, static_grad_outputs_keys)"
WITH_WGRADS = f"""{PATCH}
@@{PLAN.rstrip()}
 _order_without_wgrad = []
@@
 static_grad_outputs_keys = ANY_KEYS
+{CHOICE}
"""

DGRADS_ALONE = f"""{PATCH}
@@
-num_model_chunks = max(_order)
-num_microbatches = len(_order) // num_model_chunks // 2
-assert num_model_chunks * num_microbatches * 2 == len(_order){PLAN.rstrip()}
+num_model_chunks, num_microbatches = len(_order_plan.layers), _order_plan.microbatches
@@
-for c_id in _order:
+for i, c_id in enumerate(_order):
     ...
     if c_id > 0:
         ...
     else:
-        m_chunk = -c_id - 1
+        m_chunk = _order_plan.entries[i].chunk
         previous_per_callable_bwd_idx = None
         for l_no in ANY_LAYERS:
             ...
             if is_training:
-                with _graph_context_wrapper(bwd_graph, ...):
-                    grad_inputs = ANY_GRADS
-                if need_bwd_dw_graph[per_callable_bwd_idx]:
+                with _graph_context_wrapper(bwd_graph, ...) if not is_wgrad else contextlib.nullcontext():
+                    grad_inputs = ANY_GRADS if not is_wgrad else ()
+                if is_wgrad:
                     bwd_dw_graph = bwd_dw_graphs[per_callable_bwd_idx]
                     with _graph_context_wrapper(bwd_dw_graph, ...):
                         ...
             ...
+            if is_wgrad:
+                continue
             static_grad_inputs = []
             ...
         ...
"""

WGRAD = """
if ceil(c_id) == c_id and need_bwd_dw_graph[per_callable_bwd_idx]:
    if wgrad_validation_list[i] is None:
        ...
        for ANY_LATER in range(i + 1, len(_order)):
            ...
        ...
elif ceil(c_id) != c_id:
    ANY_INDEX: ...
    bwd_dw_graph = bwd_dw_graphs[per_callable_bwd_idx]
    with _graph_context_wrapper(bwd_dw_graph, ...):
        ...
    continue
"""

DGRAD_2_10 = """
static_input_surface = per_callable_static_input_surfaces[per_callable_bwd_idx]
static_outputs = per_callable_static_outputs[per_callable_bwd_idx]
bwd_graph = bwd_graphs[per_callable_bwd_idx]
if _reuse_graph_input_output_buffers:
    static_grad_outputs_keys = ANY_KEYS
    ...
else:
    ...
"""


def examine(source: Source) -> Verdict:
    capture = graph_capture(source)
    if capture.has("_order_without_wgrad = []"):
        reason = "wgrads are numbered by the dgrads before them, and read what was handed on at the dgrad"
        loop = {"LOOP": "i, c_id in enumerate(_order)", "CHUNK": "-ceil(c_id) - 1"}
        found = [*edits(source, WITH_WGRADS, loop), *_plain_wgrad(capture)]
    else:
        reason = "the order cannot hold wgrads"
        found = [*edits(source, DGRADS_ALONE, {"LOOP": "c_id in _order", "CHUNK": "-c_id - 1"}), _only_dgrad(capture)]
    return applicable(reason, found, new_module("graph_order"))


def _plain_wgrad(capture: Definition) -> list[Edit]:
    """Delete what counts and checks an order's wgrads, which the plan does."""
    (found,) = capture.exactly(1, WGRAD)
    wgrad, index = cast(ast.If, found.node), found["ANY_INDEX"]
    Definition(capture.module, capture.qualname, index).exactly(
        1, "per_callable_bwd_idx -= _num_layers_per_chunk[m_chunk]"
    )
    (start, _), (_, end) = map(capture.module.span, (wgrad, cast(ast.If, wgrad.orelse[0]).test))
    end = capture.module.text.index(":", end)  # behind parentheses
    return [Edit(capture.module.name, start, end, "if is_wgrad"), *map(capture.delete, index.body)]


def _only_dgrad(capture: Definition) -> Edit:
    """Put what is done for a dgrad, its buffer chosen, under the condition that this is not a wgrad."""
    (found,) = capture.exactly(1, DGRAD_2_10)
    dgrad, keys = found.node, found["ANY_KEYS"]
    (start, _), (_, end) = map(capture.module.span, (dgrad, keys))
    text, indent = capture.text(dgrad), " " * dgrad.col_offset
    text = f"{indent}{text[: end - start]}\n{indent}    {CHOICE}{text[end - start :]}"
    return capture.replace(dgrad, "if not is_wgrad:\n" + textwrap.indent(textwrap.dedent(text), "    "))


FIX = Fix(
    symptom="delayed wgrads: gradients of another microbatch, KeyError: -1, or 'already owns a captured graph'",
    group="pipelines and delayed wgrads",
    users="Megatron-Core delay_wgrad_compute, and own callers of backward_dw() or of an _order with wgrads",
    requires=("capture-without-warmup",),
    examine=examine,
    check_hints=("wgrad .grad", "wgrad main_grad"),
)
