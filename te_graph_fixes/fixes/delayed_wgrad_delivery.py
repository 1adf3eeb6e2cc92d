"""``delayed-wgrad-delivery``: a replayed `backward_dw` computes gradients that nobody gets; eagerly some get lost too.

Upstream: open

Symptom, with ``delay_wgrad_compute``: under graphs the gradients of biases, and of weights whose wgrad is not fused
into ``main_grad``, are missing (error 1.0), or garbage; captures fail with ``'NoneType' object has no attribute 'to'``
or ``attempting to assign a gradient of size '[0]'``. Eagerly, only one microbatch's gradient arrives.

`backward_dw` assigns to ``.grad`` in Python, which a replay does not repeat, and it assigns instead of adding. It now
adds, and takes for a bias gradient only what the wgrad GEMM has computed. The gradients which it gives to parameters in
a capture are kept, and added to their ``.grad`` after each replay, before the hooks; warmup and capture leave ``.grad``
as it was (`te_graph_fixes/provided/delayed_wgrad.py`, shipped beside the patched modules). GroupedLinear no longer
returns buffers that its delayed wgrad has yet to fill, and bias gradients which the dgrad returns are copied like other
gradients.

In FP8 the dgrad computes the bias gradients. Without ``param-grad-lifetime``, which has them copied, what crashed or
was lost would be wrong without a sign (measured on TE 2.15.0: 1.02), so the two go together.
"""

from __future__ import annotations

import ast
from typing import cast

from ..fix import Fix, Verdict, applicable, not_applicable, not_needed
from ..provided import module_text
from ..source import Definition, Edit, Source, UnrecognizedError

PROVIDED = "transformer_engine.pytorch._te_delayed_wgrad"
PROVIDED_TEXT = module_text("delayed_wgrad")

IMPORT = "from {dots}_te_delayed_wgrad import accumulate_grads"

# transformer_engine.pytorch.graph

KEEP = """

from ._te_delayed_wgrad import deliver_grads, take_grads

# For each wgrad graph, what its replay leaves in the graph's memory: (parameter, gradient).
static_delayed_grads = {}
"""

WARMUP = """
for module in visited_te_modules.get(func_idx, set()):
    if hasattr(module, "need_backward_dw") and module.need_backward_dw():
        need_backward_dw = True
        module.backward_dw()
"""

CAPTURE = """
with _graph_context_wrapper(bwd_dw_graph, pool=mempool):
    for module in visited_te_modules[ANY_INDEX]:
        if hasattr(module, "need_backward_dw") and module.need_backward_dw():
            module.backward_dw()
"""

CALL = "module.backward_dw()"

TAKE = "static_delayed_grads.setdefault({index}, []).extend(take_grads(module))"

UNNAMED_OUTPUTS = "tuple(o for o in outputs if o.requires_grad)"

WARMUP_END = "del outputs, grad_inputs"

FORGET_OUTPUTS = """
del outputs, grad_inputs
# What stays of warmup keeps AccumulateGrad nodes of its stream alive, which no capture can wait for.
outputs_requiring_grad = None
"""

ATTRIBUTES = "delayed_grads = static_delayed_grads.get(graph_idx, [])"

REPLAYS = ("bwd_dw_graphs[graph_idx].replay()", "bwd_dw_graph.replay()")

DELIVER = "deliver_grads(delayed_grads)"

BASE_MODULES_ONLY = "isinstance(module, TransformerEngineBaseModule)"

WITH_HOOKS = 'hasattr(module, "_trigger_wgrad_accumulation_and_reduce_hooks")'

NO_COPY = 'getattr(module_params[idx - module_param_start], "skip_backward_post_hook", False)'

NO_COPY_OF_DUMMIES = f"""(
    {NO_COPY}
    and getattr(module_params[idx - module_param_start], "grad_added_to_main_grad", False)
)"""

# transformer_engine.pytorch.module.base (Linear, LayerNormLinear)

BASE_WEIGHT = """
weight_tensor = noop_cat(self._get_weight_tensors())
weight_tensor.grad = wgrad.to(weight_tensor.dtype)
"""

BASE_BIAS = """
bias_tensor = noop_cat([getattr(self, name) for name in self.bias_names])
if bias_tensor.grad is None:
    bias_tensor.grad = bgrad.to(bias_tensor.dtype)
"""

ASSIGNED = "ANY_PARAM.grad = ANY_GRAD"

ADD_BASE_WEIGHT = "accumulate_grads([getattr(self, name) for name in self.weight_names], wgrad)"

ADD_BASE_BIAS = "accumulate_grads([getattr(self, name) for name in self.bias_names], bgrad)"

# transformer_engine.pytorch.module.layernorm_mlp

MLP = """
(fc2_wgrad, fc2_bias_grad_, *_), tensor_list_fc2 = self.wgrad_store.pop()
if self.use_bias and self.fc1_bias.grad is None:
    (fc1_wgrad, fc1_bias_grad, *_), _ = self.wgrad_store.pop()
else:
    (fc1_wgrad, *_), _ = self.wgrad_store.pop()
    fc1_bias_grad = None
if self.use_bias:
    if self.fc2_bias.grad is None:
        if (
            self.fp8
            and FP8GlobalStateManager.get_fp8_recipe().float8_block_scaling()
            and self.apply_bias
            and not self.gemm_bias_unfused_add
        ):
            act_out = tensor_list_fc2[0]
            fc2_bias_grad_ = act_out.view(-1, act_out.shape[-1]).sum(dim=0)
        self.fc2_bias.grad = fc2_bias_grad_.to(self.fc2_bias.dtype)
    if self.fc1_bias.grad is None:
        self.fc1_bias.grad = fc1_bias_grad.to(self.fc1_bias.dtype)
if not self.fuse_wgrad_accumulation:
    self.fc2_weight.grad = fc2_wgrad.to(self.fc2_weight.dtype)
    self.fc1_weight.grad = fc1_wgrad.to(self.fc1_weight.dtype)
"""

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

# transformer_engine.pytorch.module.grouped_linear

GROUPED_WEIGHTS = (
    "weight_params[i].grad = wgrad_list[i].to(weight_params[i].dtype)",
    "weight_params[i].grad = wgrad_output[i].to(weight_params[i].dtype)",
)

GROUPED_BIASES = (
    """
    if bias_params[i].grad is None:
        bias_params[i].grad = grad_biases_[i].to(bias_params[i].dtype)
    """,
    """
    if has_grad_biases[i] and bias_params[i].grad is None:
        bias_params[i].grad = grad_biases_[i].to(bias_params[i].dtype)
    """,
)

SINGLE_WEIGHT = """
weight_params[0].grad = wgrad_output.rowwise_data.view(self.num_gemms, self.out_features, self.in_features).to(
    weight_params[0].dtype
)
"""

ADD_SINGLE_WEIGHT = """
accumulate_grads(
    weight_params, wgrad_output.rowwise_data.view(self.num_gemms, self.out_features, self.in_features)
)
"""

SINGLE_BIAS = """
gstack = torch.stack(grad_biases_, dim=0).to(grouped_bias.dtype)
if grouped_bias.grad is None:
    grouped_bias.grad = gstack
else:
    grouped_bias.grad.add_(gstack)
"""

ADD_SINGLE_BIAS = "accumulate_grads([grouped_bias], torch.stack(grad_biases_, dim=0))"

RETURNED = """
if ctx.fuse_wgrad_accumulation and hasattr(weight, "grad_added_to_main_grad"):
    ...
elif ctx.fuse_wgrad_accumulation:
    wgrad = None
"""

RETURN_NOTHING = """ctx.fuse_wgrad_accumulation or (
    ctx.wgrad_store is not None and ctx.wgrad_store.delay_wgrad_compute()
)"""

# transformer_engine.pytorch.ops.basic.grouped_linear

OP = """
if self.single_grouped_weight:
    if isinstance(grad_weights, list):
        self.weight.grad = torch.stack(grad_weights, dim=0).to(self.weight.dtype)
    else:
        self.weight.grad = grad_weights.rowwise_data.view(self.num_groups, self.out_features, self.in_features).to(
            self.weight.dtype
        )
else:
    for group_idx in range(self.num_groups):
        w = getattr(self, f"weight{group_idx}")
        w.grad = grad_weights[group_idx].to(w.dtype)
"""

ADD_OP = """
if self.single_grouped_weight:
    if isinstance(grad_weights, list):
        accumulate_grads([self.weight], torch.stack(grad_weights, dim=0))
    else:
        accumulate_grads(
            [self.weight],
            grad_weights.rowwise_data.view(self.num_groups, self.out_features, self.in_features),
        )
else:
    for group_idx in range(self.num_groups):
        accumulate_grads([getattr(self, f"weight{group_idx}")], grad_weights[group_idx])
"""


def examine(source: Source) -> Verdict:
    capture = source.definition("transformer_engine.pytorch.graph", "_make_graphed_callables")
    if "backward_dw" not in capture.text(capture.node):
        return not_applicable("graphs of delayed weight gradients are not captured")
    targets = {
        _graph: capture,
        _base: source.definition("transformer_engine.pytorch.module.base", "TransformerEngineBaseModule.backward_dw"),
        _mlp: source.definition("transformer_engine.pytorch.module.layernorm_mlp", "LayerNormMLP.backward_dw"),
        _grouped: source.definition("transformer_engine.pytorch.module.grouped_linear", "GroupedLinear.backward_dw"),
    }
    op_module = source.find("transformer_engine.pytorch.ops.basic.grouped_linear")
    op = op_module and op_module.find("GroupedLinear.backward_dw")
    if op:
        targets[_op] = op
    corrected = [target for target in targets.values() if "_te_delayed_wgrad" in target.text(target.node)]
    if len(corrected) == len(targets):
        _require_corrected(source, capture)
        return not_needed("what backward_dw computes is added to the parameters' grads, after each replay too")
    if corrected:
        names = ", ".join(target.qualname for target in corrected)
        raise UnrecognizedError(f"looked for the defect in all of its places, found it corrected only in {names}")
    edits = [edit for part, target in targets.items() for edit in part(source, target)]
    new_modules = {} if source.find(PROVIDED) else {PROVIDED: PROVIDED_TEXT}
    return applicable(
        "what backward_dw assigns to .grad is lost, under graphs and at a second microbatch", edits, new_modules
    )


def _require_corrected(source: Source, capture: Definition) -> None:
    found = source.module(PROVIDED)
    if found.text != PROVIDED_TEXT:
        raise UnrecognizedError(f"looked for this package's delayed_wgrad.py in {found.path}, found another text")
    capture.one(DELIVER)
    capture.exactly(2, TAKE.format(index="ANY_INDEX"))
    capture.exactly(0, CALL)


def _graph(source: Source, capture: Definition) -> list[Edit]:
    captures = capture.exactly(2, CAPTURE)
    capture.exactly(3, CALL)
    edits = [
        capture.insert_after(capture.one("need_bwd_dw_graph = {}"), KEEP),
        capture.replace(capture.one(CALL, within=capture.one(WARMUP)), "take_grads(module)"),
    ]
    for node in captures:
        modules = cast(ast.For, cast(ast.With, node).body[0]).iter
        index = capture.text(cast(ast.Subscript, modules).slice)
        edits.append(capture.replace(capture.one(CALL, within=node), TAKE.format(index=index)))
    return edits + _warmup_end(capture) + _attribute_edits(source, capture) + _returned_edits(capture)


def _warmup_end(capture: Definition) -> list[Edit]:
    """Forget the outputs of warmup, where TE 2.13 to 2.18 give them a name of their own."""
    if not capture.has(WARMUP_END):
        capture.inner("_run_warmup_backward").one("outputs_requiring_grad = ANY")
        return []
    if capture.has(UNNAMED_OUTPUTS):
        return []
    capture.one("outputs_requiring_grad = ANY")
    return [capture.replace(capture.one(WARMUP_END), FORGET_OUTPUTS)]


def _attribute_edits(source: Source, capture: Definition) -> list[Edit]:
    """Deliver after the replay, and let the static gradients go with the graphs."""
    factory = capture.inner("make_graphed_attribute_functions")
    factory.one("return backward_dw, reset")
    factory.require_parameters("graph_idx")
    replay, reset = factory.inner("backward_dw"), factory.inner("reset")
    call = replay.one(*REPLAYS)
    edits = [
        _at_start(factory, ATTRIBUTES),
        replay.replace(call, f"{replay.text(call)}\n{DELIVER}"),
        reset.insert_after(cast(ast.FunctionDef, reset.node).body[-1], "delayed_grads.clear()"),
    ]
    op_hooks = source.find("transformer_engine.pytorch.ops.basic.grouped_linear")
    if op_hooks and op_hooks.find("GroupedLinear._trigger_wgrad_accumulation_and_reduce_hooks"):
        edits.append(replay.replace(replay.one(BASE_MODULES_ONLY), WITH_HOOKS))
    return edits


def _returned_edits(capture: Definition) -> list[Edit]:
    """Where TE copies the parameter grads that a dgrad returns, let it copy delayed modules' bias gradients too."""
    if "skip_backward_post_hook" not in capture.text(capture.node):
        return []
    return [capture.replace(capture.one(NO_COPY), NO_COPY_OF_DUMMIES)]


def _base(source: Source, backward_dw: Definition) -> list[Edit]:
    backward_dw.one("(wgrad, bgrad), _ = self.wgrad_store.pop()")
    backward_dw.exactly(2, ASSIGNED)
    backward_dw.exactly(2, "noop_cat(ANY_PARAMS)")
    return [
        _import(backward_dw),
        backward_dw.replace(backward_dw.one(BASE_WEIGHT), ADD_BASE_WEIGHT),
        backward_dw.replace(backward_dw.one(BASE_BIAS), ADD_BASE_BIAS),
    ]


def _mlp(source: Source, backward_dw: Definition) -> list[Edit]:
    backward_dw.exactly(3, "self.wgrad_store.pop()")
    backward_dw.exactly(4, ASSIGNED)
    return [_import(backward_dw), backward_dw.replace(backward_dw.one(MLP), ADD_MLP)]


def _grouped(source: Source, backward_dw: Definition) -> list[Edit]:
    backward_dw.one("(_, grad_biases_, _), tensor_list = self.wgrad_store.pop()")
    weight, bias = backward_dw.one(*GROUPED_WEIGHTS), backward_dw.one(*GROUPED_BIASES)
    wgrads = "wgrad_output" if "wgrad_output" in backward_dw.text(weight) else "wgrad_list"
    edits = [
        backward_dw.replace(weight, f"accumulate_grads([weight_params[i]], {wgrads}[i])"),
        backward_dw.replace(bias, "accumulate_grads([bias_params[i]], grad_biases_[i])"),
    ]
    if "single_grouped_weight" in backward_dw.text(backward_dw.node):
        edits.append(backward_dw.replace(backward_dw.one(SINGLE_WEIGHT), ADD_SINGLE_WEIGHT))
    if "grouped_bias.grad" in backward_dw.text(backward_dw.node):
        edits.append(backward_dw.replace(backward_dw.one(SINGLE_BIAS), ADD_SINGLE_BIAS))
    backward_dw.exactly(len(edits), ASSIGNED)
    edits.append(_import(backward_dw))
    for name in ("_GroupedLinear.backward", "_GroupedLinear._backward_grouped_tensor"):
        backward = backward_dw.module.find(name)
        if backward is not None:
            returned = cast(ast.If, cast(ast.If, backward.one(RETURNED)).orelse[0])
            edits.append(backward.replace(returned.test, RETURN_NOTHING))
    return edits


def _op(source: Source, backward_dw: Definition) -> list[Edit]:
    backward_dw.exactly(3, ASSIGNED)
    return [_import(backward_dw, dots="..."), backward_dw.replace(backward_dw.one(OP), ADD_OP)]


def _import(backward_dw: Definition, dots: str = "..") -> Edit:
    check = backward_dw.one("if not self.need_backward_dw(): return")
    return backward_dw.insert_before(check, IMPORT.format(dots=dots))


def _at_start(function: Definition, text: str) -> Edit:
    """Put ``text`` on the line below the ``def``, which has one line."""
    first = cast(ast.FunctionDef, function.node).body[0]
    if first.lineno == function.node.lineno:
        raise UnrecognizedError(f"looked for {function.qualname} on lines of its own ({function.module.path})")
    start = function.module.line_start(function.node.lineno + 1)
    return Edit(function.module.name, start, start, " " * first.col_offset + text + "\n")


FIX = Fix(
    id="delayed-wgrad-delivery",
    summary="gradients that a replayed backward_dw computes do not reach the parameters",
    symptom="bias and unfused weight gradients missing (error 1.0) or garbage; crashes in backward_dw with bias",
    upstream=(),
    affected=">=2.10",
    examine=examine,
    requires=("backward-dw-hooks", "param-grad-lifetime"),
)
