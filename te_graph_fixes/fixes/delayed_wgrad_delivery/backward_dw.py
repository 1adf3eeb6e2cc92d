"""How the `backward_dw` of TE's modules adds the gradients that it assigns to ``.grad``."""

from collections.abc import Iterable

from ...patching.source import Edit, ModuleSource, unrecognized

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

@@ module/grouped_linear.py GroupedLinear.backward_dw
+from .._te_delayed_wgrad import accumulate_grads
 if not self.need_backward_dw(): return
@@
 (_, grad_biases_, _), tensor_list = self.wgrad_store.pop()
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
-if bias_params[i].grad is None: bias_params[i].grad = grad_biases_[i].to(bias_params[i].dtype)
+accumulate_grads([bias_params[i]], grad_biases_[i])
@@ (or)
-if has_grad_biases[i] and bias_params[i].grad is None: bias_params[i].grad = grad_biases_[i].to(ANY)
+accumulate_grads([bias_params[i]], grad_biases_[i])
@@
-gstack = torch.stack(grad_biases_, dim=0).to(grouped_bias.dtype)
-if grouped_bias.grad is None: grouped_bias.grad = gstack
-else: grouped_bias.grad.add_(gstack)
+accumulate_grads([grouped_bias], torch.stack(grad_biases_, dim=0))
@@ (or, 0 times)
 grouped_bias.grad
"""
OPERATION = """
@@ ops/basic/grouped_linear.py GroupedLinear.backward_dw
+from ..._te_delayed_wgrad import accumulate_grads
 if not self.need_backward_dw(): return
@@
 _, tensor_list = self.wgrad_store.pop()
@@
-self.weight.grad = torch.stack(grad_weights, dim=0).to(self.weight.dtype)
+accumulate_grads([self.weight], torch.stack(grad_weights, dim=0))
@@
-self.weight.grad = grad_weights.rowwise_data.view(ANY, ANY, ANY).to(self.weight.dtype)
+accumulate_grads(
+    [self.weight],
+    grad_weights.rowwise_data.view(self.num_groups, self.out_features, self.in_features),
+)
@@
-w.grad = grad_weights[group_idx].to(w.dtype)
+accumulate_grads([w], grad_weights[group_idx])
"""


def require_all_replaced(module: ModuleSource, edits: Iterable[Edit]) -> None:
    """Raise `UnrecognizedError` where a `backward_dw` assigns to a ``.grad`` that no edit replaces."""
    for name, place in module.found.items():
        if place is None or not name.endswith(".backward_dw"):
            continue
        for node in place.all("ANY_PARAM.grad = ANY_GRAD"):
            start, end = module.span(node)
            if not any(edit.start <= start and end <= edit.end for edit in edits if edit.module == module.name):
                raise unrecognized("gradients that are known", place, f"`{place.text(node)}`")
