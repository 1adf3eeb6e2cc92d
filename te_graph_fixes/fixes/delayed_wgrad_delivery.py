"""``delayed-wgrad-delivery``: a replayed `backward_dw` computes gradients that nobody gets; eagerly some get lost too.

Upstream: open

Symptom, with ``delay_wgrad_compute``: under graphs the gradients of biases, and of weights whose wgrad is not fused
into ``main_grad``, are missing (error 1.0), or garbage; captures fail with ``'NoneType' object has no attribute 'to'``
or ``attempting to assign a gradient of size '[0]'``. Eagerly, only one microbatch's gradient arrives.

`backward_dw` assigns to ``.grad`` in Python, which a replay does not repeat, and it assigns instead of adding. It now
adds, and takes for a bias gradient only what the wgrad GEMM has computed. The gradients which it gives to parameters in
a capture are kept, and added to their ``.grad`` after each replay, before the hooks; warmup and capture leave ``.grad``
as it was (`te_graph_fixes/provided/delayed_wgrad.py`, shipped beside the patched modules). Modules whose ``forward`` is
called directly, which TE's forward hooks do not see, are found by the wgrad that they have to compute. GroupedLinear
no longer returns buffers that its delayed wgrad has yet to fill, and bias gradients which the dgrad returns are copied
like other gradients.

In FP8 the dgrad computes the bias gradients. Without ``param-grad-lifetime``, which has them copied, what crashed or
was lost would be wrong without a sign (measured on TE 2.15.0: 1.02), so the two go together.

``not-needed``: all that `_require_corrected` counts, and the provided module to the letter. ``not-applicable``: graphed
callables have no ``backward_dw``, as before TE 2.10.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import cast

from ..delayed_grads import add_instead, backward_dw_methods, import_of, op_has, require_added
from ..fix import Fix, Verdict, applicable, not_applicable, not_needed
from ..provided import module_text
from ..shapes import graph_capture, lacks_delayed_wgrads, require_names
from ..source import Definition, Edit, Source, unrecognized

PROVIDED = "transformer_engine.pytorch._te_delayed_wgrad"
PROVIDED_TEXT = module_text("delayed_wgrad")
CALL = "module.backward_dw()"

KEEP = """

from ._te_delayed_wgrad import deliver_grads, take_grads, visit_waiting

# For each wgrad graph, what its replay leaves in the graph's memory: (parameter, gradient).
static_delayed_grads = {}
"""
WARMUP = """
for module in visited_te_modules.get(func_idx, set()):
    if hasattr(module, "need_backward_dw") and module.need_backward_dw():
        need_backward_dw = True
        module.backward_dw()
"""
VISIT = "visit_waiting(visited_te_modules, func_idx, func)"
CAPTURE = """
with _graph_context_wrapper(bwd_dw_graph, pool=mempool):
    for module in visited_te_modules[ANY_INDEX]:
        if hasattr(module, "need_backward_dw") and module.need_backward_dw():
            module.backward_dw()
"""
TAKE = "static_delayed_grads.setdefault({index}, []).extend(take_grads(module))"
WARMUP_END = "del outputs, grad_inputs"
FORGET_OUTPUTS = """
del outputs, grad_inputs
# What stays of warmup keeps AccumulateGrad nodes of its stream alive, which no capture can wait for.
outputs_requiring_grad = None
"""
ATTRIBUTES = "delayed_grads = static_delayed_grads.get(graph_idx, [])"
DELIVER = "deliver_grads(delayed_grads)"
FORGET = "delayed_grads.clear()"
BASE_MODULES_ONLY = "isinstance(module, TransformerEngineBaseModule)"
WITH_HOOKS = 'hasattr(module, "_trigger_wgrad_accumulation_and_reduce_hooks")'
NO_COPY = 'getattr(module_params[idx - module_param_start], "skip_backward_post_hook", False)'
COPY_BIASES = f"""(
    {NO_COPY}
    and id(module_params[idx - module_param_start]) not in static_delayed_biases
)"""
BIASES = """
from ._te_delayed_wgrad import delayed_biases

# A dgrad may return the grads of these, although their module delays its wgrads.
static_delayed_biases = delayed_biases(callables)

"""
RETURNED = """
if ctx.fuse_wgrad_accumulation and hasattr(weight, "grad_added_to_main_grad"):
    ...
elif {}:
    wgrad = None
"""
FUSED = "ctx.fuse_wgrad_accumulation"
FUSED_OR_DELAYED = """ctx.fuse_wgrad_accumulation or (
    ctx.wgrad_store is not None and ctx.wgrad_store.delay_wgrad_compute()
)"""


def examine(source: Source) -> Verdict:
    if lacks_delayed_wgrads(source):
        return not_applicable("graphs of delayed weight gradients are not captured")
    capture = graph_capture(source)
    methods = backward_dw_methods(source)
    corrected = [each for each in (capture, *methods.values()) if "_te_delayed_wgrad" in each.text(each.node)]
    if corrected:
        _require_corrected(source, capture, methods)
        return not_needed("what backward_dw computes is added to the parameters' grads, after each replay too")
    edits = _graph(source, capture)
    for name, backward_dw in methods.items():
        edits += add_instead(name, backward_dw)
    for backward in _dgrads(source):
        returned = cast(ast.If, backward.one(RETURNED.format(FUSED)))
        edits.append(backward.replace(cast(ast.If, returned.orelse[0]).test, FUSED_OR_DELAYED))
    new_modules = {} if source.find(PROVIDED) else {PROVIDED: PROVIDED_TEXT}
    return applicable(
        "what backward_dw assigns to .grad is lost, under graphs and at a second microbatch", edits, new_modules
    )


def _dgrads(source: Source) -> list[Definition]:
    """What computes the dgrad of experts, and may return buffers that their wgrad has yet to fill."""
    module = source.module("transformer_engine.pytorch.module.grouped_linear")
    other = module.find("_GroupedLinear._backward_grouped_tensor")
    return [module.definition("_GroupedLinear.backward"), *([other] if other else [])]


def _graph(source: Source, capture: Definition) -> list[Edit]:
    require_names(capture, "func")
    warmup = capture.one(WARMUP)
    edits = [
        capture.insert_after(capture.one("need_bwd_dw_graph = {}"), KEEP),
        capture.insert_before(warmup, VISIT),
        capture.replace(capture.one(CALL, within=warmup), "take_grads(module)"),
    ]
    capture.exactly(2, CAPTURE)
    capture.exactly(3, CALL)
    for match in capture.matches(CAPTURE):
        call = capture.one(CALL, within=match.node)
        edits.append(capture.replace(call, TAKE.format(index=capture.text(match["ANY_INDEX"]))))
    if "skip_backward_post_hook" in capture.text(capture.node):  # TE copies the parameter grads of a dgrad
        slots = capture.inner("_returned_param_grad_clone_slots")
        require_names(capture, "callables")
        edits += [capture.insert_before(slots.node, BIASES), slots.replace(slots.one(NO_COPY), COPY_BIASES)]
    if _names_outputs(capture):
        edits.append(capture.replace(capture.one(WARMUP_END), FORGET_OUTPUTS))
    return edits + _attributes(source, capture)


def _names_outputs(capture: Definition) -> bool:
    """Whether the outputs of warmup outlive it under a name of their own, as in TE 2.13 to 2.18."""
    if capture.has("tuple(o for o in outputs if o.requires_grad)"):
        return False
    capture.one("outputs_requiring_grad = tuple(ANY)")
    return capture.has(WARMUP_END)


def _attributes(source: Source, capture: Definition) -> list[Edit]:
    """Deliver after the replay, and let the static gradients go with the graphs."""
    factory = capture.inner("make_graphed_attribute_functions")
    factory.one("return backward_dw, reset")
    require_names(factory, "graph_idx")
    replay, reset = factory.inner("backward_dw"), factory.inner("reset")
    call = replay.one("bwd_dw_graphs[graph_idx].replay()", "bwd_dw_graph.replay()")
    edits = [
        _at_start(factory, ATTRIBUTES),
        replay.replace(call, f"{replay.text(call)}\n{DELIVER}"),
        reset.insert_after(reset.node.body[-1], FORGET),
    ]
    if op_has(source, "_trigger_wgrad_accumulation_and_reduce_hooks"):
        edits.append(replay.replace(replay.one(BASE_MODULES_ONLY), WITH_HOOKS))
    return edits


def _require_corrected(source: Source, capture: Definition, methods: Mapping[str, Definition]) -> None:
    """Raise `UnrecognizedError` unless all of the correction is there."""
    found = source.module(PROVIDED)
    if found.text != PROVIDED_TEXT:
        raise unrecognized("this package's delayed_wgrad.py", found.path, "another text")
    once = dict.fromkeys((KEEP, "need_bwd_dw_graph = {}", VISIT, DELIVER, FORGET, ATTRIBUTES), 1)
    capture.one("bwd_dw_graphs[graph_idx].replay()", "bwd_dw_graph.replay()")
    copies = len(capture.all(NO_COPY))
    counts = {CALL: 0, "take_grads(module)": 3, TAKE.format(index="ANY"): 2, COPY_BIASES: copies, BIASES: copies}
    outputs, hooks = _names_outputs(capture), op_has(source, "_trigger_wgrad_accumulation_and_reduce_hooks")
    for pattern, count in (once | counts | {FORGET_OUTPUTS: outputs, WITH_HOOKS: hooks}).items():
        capture.exactly(count, pattern)
    for name, method in methods.items():
        method.one(f"{import_of(name)}\nif not self.need_backward_dw(): return")
        method.one("if not self.need_backward_dw(): return")
        require_added(name, method)
    for backward in _dgrads(source):
        backward.one(RETURNED.format(FUSED_OR_DELAYED))


def _at_start(function: Definition, text: str) -> Edit:
    """Put ``text`` on the line below the ``def``, which has one line."""
    first = function.node.body[0]
    if first.lineno == function.node.lineno:
        raise unrecognized("a function on lines of its own", function, "it on one line")
    start = function.module.starts[function.node.lineno + 1]
    return Edit(function.module.name, start, start, " " * first.col_offset + text + "\n")


FIX = Fix(
    id="delayed-wgrad-delivery",
    summary="gradients that a replayed backward_dw computes do not reach the parameters",
    symptom="bias and unfused weight gradients missing (error 1.0) or garbage; crashes in backward_dw with bias",
    upstream=(),
    affected=">=2.10",
    examine=examine,
    requires=("backward-dw-hooks", "param-grad-lifetime"),
    looks_like=("wgrad .grad",),
)
