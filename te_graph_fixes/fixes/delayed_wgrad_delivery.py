"""``delayed-wgrad-delivery``: gradients that a replayed ``backward_dw`` computes do not reach the parameters.

Upstream: none yet

With ``delay_wgrad_compute``, `backward_dw` assigns the gradients of biases, and of weights whose wgrad is not fused, to
``.grad`` in Python. A replay does not repeat that, and eagerly it replaces the gradients of earlier microbatches. It
now adds, and takes for a bias gradient only what the wgrad GEMM has computed. Gradients that it gives to parameters in
a capture are added to their ``.grad`` after each replay, before the hooks; warmup and capture leave ``.grad`` as it was
(`te_graph_fixes/shipped/delayed_wgrad.py`). This holds for modules whose ``forward`` is called directly, too.
GroupedLinear no longer returns buffers that its delayed wgrad has yet to fill.
"""

from ..fix import Fix

# `replay()` replaces itself, so that lines which `backward-dw-hooks` inserts below it come after the delivery.
PATCH = """
@@ graph.py _make_graphed_callables
 need_bwd_dw_graph = {}
+
+from ._te_delayed_wgrad import deliver_grads, take_grads, visit_waiting
+
+# For each wgrad graph, what its replay leaves in the graph's memory: (parameter, gradient).
+static_delayed_grads = {}
@@
+visit_waiting(visited_te_modules, func_idx, func)
 for module in visited_te_modules.get(func_idx, set()):
     if hasattr(module, "need_backward_dw") and module.need_backward_dw():
         need_backward_dw = True
-        module.backward_dw()
+        take_grads(module)
@@ (2 times)
 with ..., _graph_context_wrapper(bwd_dw_graph, ...):
     for module in visited_te_modules[ANY_INDEX]:
         if hasattr(module, "need_backward_dw") and module.need_backward_dw():
-            module.backward_dw()
+            static_delayed_grads.setdefault(ANY_INDEX, []).extend(take_grads(module))
@@ (3 times)
 module.backward_dw()

@@ graph.py _make_graphed_callables.make_graphed_attribute_functions (at its start)
+delayed_grads = static_delayed_grads.get(graph_idx, [])
@@ graph.py _make_graphed_callables.make_graphed_attribute_functions.backward_dw
-ANY_GRAPH.replay()
+ANY_GRAPH.replay()
+deliver_grads(delayed_grads)
@@ graph.py _make_graphed_callables.make_graphed_attribute_functions.reset
 bwd_dw_graphs[graph_idx].reset()
+delayed_grads.clear()
@@ (or)
 helpers.release_static_state()
+delayed_grads.clear()

@@ graph.py _make_graphed_callables._returned_param_grad_clone_slots (if there, at its start)
+from ._te_delayed_wgrad import delayed_biases
+
+# A dgrad may return the grads of these, although their module delays its wgrads.
+static_delayed_biases = delayed_biases(callables)
+
@@ graph.py _make_graphed_callables._returned_param_grad_clone_slots (if there)
-getattr(module_params[idx - module_param_start], "skip_backward_post_hook", ANY)
+(
+    getattr(module_params[idx - module_param_start], "skip_backward_post_hook", False)
+    and id(module_params[idx - module_param_start]) not in static_delayed_biases
+)

@@ graph.py _make_graphed_callables
 if is_training:
     ...
     with ..., _none_grad_context_wrapper(inputs, ...):
         outputs_requiring_grad = tuple(ANY)
         ...
     ...
 else:
     ...
 del outputs, grad_inputs
+# The last outputs of warmup keep AccumulateGrad nodes of its stream alive, which no capture can wait for.
+outputs_requiring_grad = None
@@ (or, at least once)
 tuple(o for o in outputs if o.requires_grad)
@@ (or, 0 times)
 del outputs, grad_inputs

@@ module/grouped_linear.py _GroupedLinear.backward
 if ctx.fuse_wgrad_accumulation and hasattr(weight, "grad_added_to_main_grad"):
     ...
-elif ctx.fuse_wgrad_accumulation:
+elif ctx.fuse_wgrad_accumulation or (
+    ctx.wgrad_store is not None and ctx.wgrad_store.delay_wgrad_compute()
+):
     wgrad = None
@@ module/grouped_linear.py _GroupedLinear._backward_grouped_tensor (if there)
 if ctx.fuse_wgrad_accumulation and hasattr(weight, "grad_added_to_main_grad"):
     ...
-elif ctx.fuse_wgrad_accumulation:
+elif ctx.fuse_wgrad_accumulation or (
+    ctx.wgrad_store is not None and ctx.wgrad_store.delay_wgrad_compute()
+):
     wgrad = None
"""

# How the `backward_dw` of each module adds the gradients that it assigned, all of them.
MODULES = """
@@ module/base.py TransformerEngineBaseModule.backward_dw
+from .._te_delayed_wgrad import accumulate_grads
 if not self.need_backward_dw(): return
@@
 (wgrad, bgrad), _ = self.wgrad_store.pop()
 if not self.fuse_wgrad_accumulation:
-    weight_tensor = noop_cat(self._get_weight_tensors())
-    weight_tensor.grad = wgrad.to(weight_tensor.dtype)
+    accumulate_grads([getattr(self, name) for name in self.weight_names], wgrad)
 if ANY_GRAD_IS_THERE:
-    bias_tensor = noop_cat([getattr(self, name) for name in self.bias_names])
-    if bias_tensor.grad is None: bias_tensor.grad = bgrad.to(bias_tensor.dtype)
+    accumulate_grads([getattr(self, name) for name in self.bias_names], bgrad)
@@ (2 times)
 ANY_PARAM.grad = ANY_GRAD

@@ module/layernorm_mlp.py LayerNormMLP.backward_dw
+from .._te_delayed_wgrad import accumulate_grads
 if not self.need_backward_dw(): return
@@
-(fc2_wgrad, fc2_bias_grad_, *_), tensor_list_fc2 = self.wgrad_store.pop()
-if self.use_bias and self.fc1_bias.grad is None:
-    (fc1_wgrad, fc1_bias_grad, *_), _ = self.wgrad_store.pop()
-else:
-    (fc1_wgrad, *_), _ = self.wgrad_store.pop()
-    fc1_bias_grad = None
+(fc2_wgrad, fc2_bias_grad_, *_), _ = self.wgrad_store.pop()
+(fc1_wgrad, fc1_bias_grad, *_), _ = self.wgrad_store.pop()
 if self.use_bias:
-    if self.fc2_bias.grad is None:
-        if ANY_FUSED:
-            act_out = tensor_list_fc2[0]
-            fc2_bias_grad_ = ANY_SUM
-        self.fc2_bias.grad = fc2_bias_grad_.to(self.fc2_bias.dtype)
-    if self.fc1_bias.grad is None: self.fc1_bias.grad = fc1_bias_grad.to(self.fc1_bias.dtype)
+    accumulate_grads([self.fc2_bias], fc2_bias_grad_)
+    accumulate_grads([self.fc1_bias], fc1_bias_grad)
 if not self.fuse_wgrad_accumulation:
-    self.fc2_weight.grad = fc2_wgrad.to(self.fc2_weight.dtype)
-    self.fc1_weight.grad = fc1_wgrad.to(self.fc1_weight.dtype)
+    accumulate_grads([self.fc2_weight], fc2_wgrad)
+    accumulate_grads([self.fc1_weight], fc1_wgrad)
@@ (4 times)
 ANY_PARAM.grad = ANY_GRAD

@@ module/grouped_linear.py GroupedLinear.backward_dw
+from .._te_delayed_wgrad import accumulate_grads
 if not self.need_backward_dw(): return
@@
-weight_params[i].grad = ANY_WGRADS[i].to(weight_params[i].dtype)
+accumulate_grads([weight_params[i]], ANY_WGRADS[i])
@@
-weight_params[0].grad = wgrad_output.rowwise_data.view(ANY, ANY, ANY).to(weight_params[0].dtype)
+accumulate_grads(
+    [weight_params[0]],
+    wgrad_output.rowwise_data.view(self.num_gemms, self.out_features, self.in_features),
+)
@@ (or, 0 times)
 weight_params[0].grad = ANY
@@
-if ANY_GRAD_IS_MISSING: bias_params[i].grad = grad_biases_[i].to(ANY)
+accumulate_grads([bias_params[i]], grad_biases_[i])
@@
-gstack = torch.stack(grad_biases_, dim=0).to(grouped_bias.dtype)
-if grouped_bias.grad is None: grouped_bias.grad = gstack
-else: grouped_bias.grad.add_(gstack)
+accumulate_grads([grouped_bias], torch.stack(grad_biases_, dim=0))
@@ (or, 0 times)
 grouped_bias.grad
@@ (2 times)
 ANY_PARAM.grad = ANY_GRAD
@@ (or, 3 times)
 ANY_PARAM.grad = ANY_GRAD

@@ ops/basic/grouped_linear.py GroupedLinear.backward_dw (if there)
+from ..._te_delayed_wgrad import accumulate_grads
 if not self.need_backward_dw(): return
@@ (if there)
-self.weight.grad = torch.stack(grad_weights, dim=0).to(self.weight.dtype)
+accumulate_grads([self.weight], torch.stack(grad_weights, dim=0))
@@ (if there)
-self.weight.grad = grad_weights.rowwise_data.view(ANY, ANY, ANY).to(self.weight.dtype)
+accumulate_grads(
+    [self.weight],
+    grad_weights.rowwise_data.view(self.num_groups, self.out_features, self.in_features),
+)
@@ (if there)
-w.grad = grad_weights[group_idx].to(w.dtype)
+accumulate_grads([w], grad_weights[group_idx])
@@ (if there, 3 times)
 ANY_PARAM.grad = ANY_GRAD
"""

# The operation `te.ops.GroupedLinear` has hooks from TE 2.15 on.
HOOKS_OF_OPERATIONS = """
@@ graph.py _make_graphed_callables.make_graphed_attribute_functions.backward_dw
-isinstance(module, TransformerEngineBaseModule)
+hasattr(module, "_trigger_wgrad_accumulation_and_reduce_hooks")
@@ (or, 0 times)
 isinstance(module, TransformerEngineBaseModule)
"""

FIX = Fix(
    symptom="delayed wgrads: gradients of biases and unfused weights never arrive, are garbage, or stop with an error",
    group="pipelines and delayed wgrads",
    affects="Megatron --delay-wgrad-compute (delay_wgrad_compute) with biases, or with wgrads that are not fused",
    cost="memory for the gradients that a wgrad graph delivers, and an addition of each after its replay",
    patch=PATCH + MODULES + HOOKS_OF_OPERATIONS,
    provides=("delayed_wgrad",),
    requires=("backward-dw-hooks", "param-grad-lifetime", "wgrad-without-dgrad"),
    check_hints=("wgrad .grad",),
)
