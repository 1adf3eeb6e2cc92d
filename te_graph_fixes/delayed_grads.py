"""Where the modules of TransformerEngine (TE) assign delayed gradients to ``.grad``, and how they are added instead."""

from __future__ import annotations

from .shapes import require_digest
from .source import Definition, Edit, Source

OP = "ops.basic.grouped_linear"
ASSIGNED = "ANY_PARAM.grad = ANY_GRAD"


def _assigned(parameter: str, grad: str, condition: str = "") -> dict[str, str]:
    """How TE assigns ``grad`` to the ``.grad`` of ``parameter``, and what becomes of it."""
    added = f"accumulate_grads([{parameter}], {grad})"
    if len(added) > 80:
        added = f"accumulate_grads(\n    [{parameter}],\n    {grad},\n)"
    return {f"{condition}{parameter}.grad = {grad}.to({parameter}.dtype)": added}


BASE_WEIGHT = """
weight_tensor = noop_cat(self._get_weight_tensors())
weight_tensor.grad = wgrad.to(weight_tensor.dtype)
"""
BASE_BIAS = """
bias_tensor = noop_cat([getattr(self, name) for name in self.bias_names])
if bias_tensor.grad is None:
    bias_tensor.grad = bgrad.to(bias_tensor.dtype)
"""
BASE = (
    {BASE_WEIGHT: "accumulate_grads([getattr(self, name) for name in self.weight_names], wgrad)"},
    {BASE_BIAS: "accumulate_grads([getattr(self, name) for name in self.bias_names], bgrad)"},
)
MLP = """
(fc2_wgrad, fc2_bias_grad_, *_), tensor_list_fc2 = self.wgrad_store.pop()
...
if not self.fuse_wgrad_accumulation:
    ...
"""
MLP_DIGEST = "95392d2421d607fe"  # of all that it matches, in every TE since 2.10
ADD_MLP = """
(fc2_wgrad, fc2_bias_grad_, *_), _ = self.wgrad_store.pop()
(fc1_wgrad, fc1_bias_grad, *_), _ = self.wgrad_store.pop()
if self.use_bias:
    accumulate_grads([self.fc2_bias], fc2_bias_grad_)
    accumulate_grads([self.fc1_bias], fc1_bias_grad)
if not self.fuse_wgrad_accumulation:
    accumulate_grads([self.fc2_weight], fc2_wgrad)
    accumulate_grads([self.fc1_weight], fc1_wgrad)
"""
ROWWISE = "{}.rowwise_data.view(self.{}, self.out_features, self.in_features)"
GROUPED = (
    _assigned("weight_params[i]", "wgrad_list[i]") | _assigned("weight_params[i]", "wgrad_output[i]"),
    _assigned("bias_params[i]", "grad_biases_[i]", "if bias_params[i].grad is None: ")
    | _assigned("bias_params[i]", "grad_biases_[i]", "if has_grad_biases[i] and bias_params[i].grad is None: "),
)
SINGLE_WEIGHT = _assigned("weight_params[0]", ROWWISE.format("wgrad_output", "num_gemms"))
SINGLE_BIAS = {
    """
    gstack = torch.stack(grad_biases_, dim=0).to(grouped_bias.dtype)
    if grouped_bias.grad is None:
        grouped_bias.grad = gstack
    else:
        grouped_bias.grad.add_(gstack)
    """: "accumulate_grads([grouped_bias], torch.stack(grad_biases_, dim=0))"
}
GROUPED_OP = (
    _assigned("self.weight", "torch.stack(grad_weights, dim=0)"),
    _assigned("self.weight", ROWWISE.format("grad_weights", "num_groups")),
    _assigned("w", "grad_weights[group_idx]"),
)
METHODS = {
    "module.base": ("TransformerEngineBaseModule", "(wgrad, bgrad), _ = self.wgrad_store.pop()", BASE),
    "module.layernorm_mlp": ("LayerNormMLP", "(fc1_wgrad, *_), _ = self.wgrad_store.pop()", ({MLP: ADD_MLP},)),
    "module.grouped_linear": ("GroupedLinear", "(_, grad_biases_, _), tensor_list = self.wgrad_store.pop()", GROUPED),
    OP: ("GroupedLinear", "_, tensor_list = self.wgrad_store.pop()", GROUPED_OP),
}
"""By module: the class, where its `backward_dw` gets the grads, what it assigns, and what becomes of that."""


def backward_dw_methods(source: Source) -> dict[str, Definition]:
    """The `backward_dw` of each module that delays gradients, by module; raises where one is missing."""
    return {
        name: source.module(f"transformer_engine.pytorch.{name}").definition(f"{owner}.backward_dw")
        for name, (owner, _, _) in METHODS.items()
        if name != OP or op_has(source, "backward_dw")
    }


def op_has(source: Source, name: str) -> bool:
    """Whether the grouped operation of te.ops has a method; it delays wgrads in newer TE only."""
    module = source.find(f"transformer_engine.pytorch.{OP}")
    return module is not None and name in module.text and bool(module.definition(f"GroupedLinear.{name}"))


def import_of(name: str) -> str:
    """The import of what adds, in module ``name``."""
    return f"from {'.' * (name.count('.') + 1)}_te_delayed_wgrad import accumulate_grads"


def add_instead(name: str, method: Definition) -> list[Edit]:
    """The edits that let the ``method`` of module ``name`` add what it assigns, all of which has to be in `METHODS`."""
    _, grads, assigned = METHODS[name]
    method.one(grads)
    check = method.one("if not self.need_backward_dw(): return")
    edits = [method.insert_before(check, import_of(name))]
    known = 0
    for shapes in _shapes(name, method):
        node = method.one(*shapes)
        known += len(method.all(ASSIGNED, within=node))
        edits.append(method.replace(node, next(added for shape, added in shapes.items() if method.has(shape))))
        if MLP in shapes:
            require_digest(method, node, MLP_DIGEST)
    method.exactly(known, ASSIGNED)
    method.exactly(2 * (assigned is BASE), "noop_cat(ANY)")
    return edits


def _shapes(name: str, method: Definition) -> tuple[dict[str, str], ...]:
    """What the method assigns, each in the forms that it may have, with what becomes of them."""
    text, found = method.text(method.node), METHODS[name][2]
    if "single_grouped_weight" in text and name != OP:
        found += (SINGLE_WEIGHT,)
    if "grouped_bias.grad" in text:
        found += (SINGLE_BIAS,)
    return found
