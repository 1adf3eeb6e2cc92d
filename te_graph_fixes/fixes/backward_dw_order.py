"""``backward-dw-order``: delayed weight gradients are captured, or fed, out of order.

Upstream: https://github.com/NVIDIA/TransformerEngine/pull/2376 (TE 2.11) lets ``_order`` hold wgrads; the rest is open.

Symptom, by order: wrong weight gradients without an error (``[1,-1,1,-1.5,-1,-1.5]``: off by 0.99 of their norm),
"CUDAGraph instance already owns a captured graph" (``[1,1,-1,-1,-1.5,-1.5]``), ``KeyError: -1`` (``[1,-1.5,-1]``), and
on TE 2.10 a bare ``AssertionError`` for any order with wgrads.

`_make_graphed_callables` numbers a wgrad by the dgrads before it instead of the wgrads, and hands a microbatch's static
inputs and its grad-output buffer on at its dgrad although its wgrad reads them later. A plan made once from the order
(`te_graph_fixes/provided/graph_order.py`, the grammar of orders; shipped beside the patched module) now says what is
captured where and which buffers it uses, and refuses an illegal order at the start. Where modules delay their wgrad and
the order does not say when it runs, it is captured right after its dgrad, as TE 2.10 does and TE 2.11 and later refuse.

``not-needed``: the plan's module is there, what it settles is found once (`CORRECTED`), the old numbering nowhere.
``not-applicable``: graphed callables have no ``backward_dw``, as before TE 2.10.
"""

from __future__ import annotations

import ast
import textwrap
from typing import Any, cast

from ..fix import Fix, Verdict, applicable, not_applicable, not_needed
from ..provided import plan_module
from ..shapes import BACKWARD_INDEX, behind, digest, graph_capture, lacks_delayed_wgrads, require_names, require_own
from ..source import Definition, Edit, Node, Run, Source, unrecognized

MAKE_PLAN = """
from ._te_graph_order import make_plan

_order_plan = make_plan(
    _order,
    _num_layers_per_chunk,
    callables=len(callables),
    sample_args=len(sample_args),
    sample_kwargs=len(sample_kwargs),
    training=is_training,
)
_order, _num_layers_per_chunk = _order_plan.order, _order_plan.layers
if _order_plan.delayed:
    sample_args, sample_kwargs = _order_plan.assign_inputs(
        sample_args,
        sample_kwargs,
        reuse=_reuse_graph_input_output_buffers,
        flatten=_tree_flatten,
        unflatten=_tree_unflatten,
    )
"""

NUMBER_OF_MICROBATCHES = """
num_model_chunks = max(_order)
num_microbatches = len(_order) // num_model_chunks // 2
assert num_model_chunks * num_microbatches * 2 == len(_order)
"""

REUSE_INPUTS = """
fwd_sample_qs = {}
consumed_sample_q = {}
fwd_idx = [0] * num_model_chunks
for c_id in _order:
    m_chunk = ANY_CHUNK
    if c_id > 0:
        ...
    else:
        ...
"""

CAPTURE = """
for ANY_ENTRY in ANY_ORDER:
    ...
    if c_id > 0:
        ...
    else:
        m_chunk = ANY_CHUNK
        previous_per_callable_bwd_idx = None
        for l_no in list(reversed(range(_num_layers_per_chunk[m_chunk]))):
            ...
        ...
"""

WGRAD = """
if ceil(c_id) == c_id and need_bwd_dw_graph[per_callable_bwd_idx]:
    if wgrad_validation_list[i] is None:
        ANY_COUNTING: ...
elif ceil(c_id) != c_id:
    ANY_CHECKS: ...
    bwd_dw_graph = bwd_dw_graphs[per_callable_bwd_idx]
    with _graph_context_wrapper(bwd_dw_graph, pool=mempool):
        ...
    continue
"""

WGRAD_DIGESTS = (("f5ca6508bf182875", "783ff9768eeb2d99"), ("63a4802167254dd5", "a5d5674823805dc1"))
"""The `digest` of what counts an order's wgrads, and of what checks them, in TE since 2.11 and since 2.14."""
GRAD_OUTPUTS = """
static_grad_outputs_keys = ANY_KEYS
if static_grad_outputs_keys in static_grad_outputs_dict:
    static_grad_outputs = static_grad_outputs_dict[static_grad_outputs_keys]
else:
    static_grad_outputs = ANY_BUFFERS
    static_grad_outputs_dict[static_grad_outputs_keys] = static_grad_outputs
"""
CHOOSE_BUFFER = "static_grad_outputs_keys = _order_plan.grad_output(i, static_grad_outputs_keys)"

DGRAD_2_10 = """
static_input_surface = per_callable_static_input_surfaces[per_callable_bwd_idx]
static_outputs = per_callable_static_outputs[per_callable_bwd_idx]
bwd_graph = bwd_graphs[per_callable_bwd_idx]
if _reuse_graph_input_output_buffers:
    ...
else:
    ...
"""
CAPTURE_2_10 = "_graph_context_wrapper(bwd_graph, pool=mempool)"
WGRAD_AFTER_DGRAD = """
if {}:
    bwd_dw_graph = bwd_dw_graphs[per_callable_bwd_idx]
    with _graph_context_wrapper(bwd_dw_graph, pool=mempool):
        ...
"""
WGRAD_2_10 = WGRAD_AFTER_DGRAD.format("need_bwd_dw_graph[per_callable_bwd_idx]")
WGRAD_OF_PLAN_2_10 = WGRAD_AFTER_DGRAD.format("is_wgrad")
WGRAD_OF_PLAN = f"{WGRAD_OF_PLAN_2_10}    continue\n"
SKIP_WGRAD = "if is_wgrad:\n    continue"
NO_GRAPH = " if not is_wgrad else contextlib.nullcontext()"
NO_GRADS = " if not is_wgrad else ()"
PLANNED_LAYERS = "for l_no, is_wgrad in _order_plan.backward(i, need_bwd_dw_graph): ..."
CORRECTED = (
    *(MAKE_PLAN, "_order_plan = ANY"),
    GRAD_OUTPUTS.replace("ANY_KEYS\n", f"ANY_KEYS\n{CHOOSE_BUFFER}\n"),
    "reuse_fwd_idx = ANY_SAMPLE",
    "for c_id in () if _order_plan.delayed else _order: ...",
    PLANNED_LAYERS,
    "per_callable_bwd_idx = _order_plan.index(i, l_no)",
    "for i, c_id in enumerate(_order): ...",
)
CORRECTED_2_10 = (
    *(f"{CAPTURE_2_10}{NO_GRAPH}", f"grad_inputs = ANY_GRADS{NO_GRADS}"),
    *(WGRAD_OF_PLAN_2_10, SKIP_WGRAD, "m_chunk = _order_plan.entries[i].chunk"),
)
"""What is found once in a source that has been corrected, and then what is in none."""
DEFECTS = (NUMBER_OF_MICROBATCHES, WGRAD, WGRAD_2_10)


def examine(source: Source) -> Verdict:
    if lacks_delayed_wgrads(source):
        return not_applicable("graphs of delayed weight gradients are not captured")
    capture = graph_capture(source)
    if "_order_plan" in capture.text(capture.node):
        return _corrected(source, capture)
    for name in ("_tree_flatten", "_tree_unflatten"):
        if f"as {name}\n" not in capture.module.text:
            raise unrecognized(f"an import of {name}", capture.module.path)
    require_names(capture, "callables", "sample_args", "sample_kwargs", "_reuse_graph_input_output_buffers")
    loop = cast(ast.For, capture.one(CAPTURE))
    layers = cast(ast.For, capture.one("for l_no in list(reversed(range(ANY))): ...", within=loop))
    number = cast(ast.Assign, capture.one(BACKWARD_INDEX, within=layers)).value
    capture.one("reuse_fwd_idx = ANY_SAMPLE")
    edits = [
        capture.replace(cast(Any, capture.one(REUSE_INPUTS)).body[-1].iter, "() if _order_plan.delayed else _order"),
        capture.replace(layers.target, "l_no, is_wgrad"),
        capture.replace(layers.iter, "_order_plan.backward(i, need_bwd_dw_graph)"),
        capture.replace(number, "_order_plan.index(i, l_no)"),
    ]
    if capture.has(NUMBER_OF_MICROBATCHES):
        reason = "the order cannot hold wgrads"
        edits += _edits_2_10(capture, loop, layers)
    else:
        reason = "wgrads are numbered by the dgrads before them, and read what was handed on at the dgrad"
        edits += _edits(capture, layers)
    return applicable(
        f"{reason}; where an order gives no wgrads, delayed ones are captured right after their dgrad",
        edits,
        plan_module(source),
    )


def _corrected(source: Source, capture: Definition) -> Verdict:
    """``not-needed`` where everything follows this package's plan; raises for a part of it."""
    if plan_module(source):
        raise unrecognized("this package's _te_graph_order", source.location)
    since_2_11 = f"{MAKE_PLAN}\n...\n_order_without_wgrad = []", "_order_without_wgrad = []"
    for pattern in (*CORRECTED, *(since_2_11 if capture.has(WGRAD_OF_PLAN) else CORRECTED_2_10)):
        capture.one(pattern)
    for pattern in DEFECTS:
        capture.exactly(0, pattern)
    capture.exactly(0, BACKWARD_INDEX, within=capture.one(PLANNED_LAYERS))
    capture.one("static_grad_outputs_keys in static_grad_outputs_dict", within=capture.one(PLANNED_LAYERS))
    require_own([(capture, "", True)])
    return not_needed("captures follow a plan made from the order")


def _edits(capture: Definition, layers: ast.For) -> list[Edit]:
    """For TE 2.11 and later: orders may hold wgrads."""
    capture.one("for i, c_id in enumerate(_order): ...")
    (found,) = capture.exactly(1, WGRAD, within=layers)
    digests = digest(found["ANY_COUNTING"]), digest(found["ANY_CHECKS"])
    if digests not in WGRAD_DIGESTS:
        raise unrecognized(f"wgrads that are checked as in one of {WGRAD_DIGESTS}", capture, f"{digests}")
    wgrad = cast(ast.If, found.node)
    (start, _), (_, end) = map(capture.module.span, (wgrad, cast(ast.If, wgrad.orelse[0]).test))
    return [
        capture.insert_before(capture.one("_order_without_wgrad = []"), MAKE_PLAN),
        Edit(capture.module.name, start, end, "if is_wgrad"),
        *map(capture.delete, cast(Run, found["ANY_CHECKS"]).body),
        capture.insert_after(cast(Run, capture.one(GRAD_OUTPUTS, within=layers)).body[0], CHOOSE_BUFFER),
    ]


def _edits_2_10(capture: Definition, loop: ast.For, layers: ast.For) -> list[Edit]:
    """For TE 2.10: orders hold whole numbers, and each wgrad is captured with its dgrad."""
    dgrad = capture.one(DGRAD_2_10, within=layers)
    keys = cast(Run, capture.one(GRAD_OUTPUTS, within=dgrad)).body[0]
    graph = capture.one(CAPTURE_2_10, within=layers)
    (grads,) = capture.exactly(1, "grad_inputs = ANY_GRADS", within=capture.statement_with(graph))
    numbers = "num_model_chunks, num_microbatches = len(_order_plan.layers), _order_plan.microbatches"
    return [
        capture.replace(capture.one(NUMBER_OF_MICROBATCHES), MAKE_PLAN.strip("\n") + "\n" + numbers),
        capture.replace(loop.target, "i, c_id"),
        capture.replace(loop.iter, "enumerate(_order)"),
        capture.replace(cast(Any, loop.body[-1]).orelse[0].value, "_order_plan.entries[i].chunk"),
        _only_dgrad(capture, dgrad, keys),
        behind(capture, graph, NO_GRAPH),
        behind(capture, grads["ANY_GRADS"], NO_GRADS),
        capture.replace(cast(ast.If, capture.one(WGRAD_2_10, within=layers)).test, "is_wgrad"),
        capture.insert_before(capture.one("static_grad_inputs = []", within=layers), SKIP_WGRAD),
    ]


def _only_dgrad(capture: Definition, dgrad: Node, keys: Node) -> Edit:
    """Put the ``dgrad``, its buffer chosen behind ``keys``, under the condition that this is not a wgrad."""
    (start, _), (_, end) = map(capture.module.span, (dgrad, keys))
    text, indent = capture.text(dgrad), " " * dgrad.col_offset
    text = f"{indent}{text[: end - start]}\n{' ' * keys.col_offset}{CHOOSE_BUFFER}{text[end - start :]}"
    return capture.replace(dgrad, "if not is_wgrad:\n" + textwrap.indent(textwrap.dedent(text), "    "))


FIX = Fix(
    id="backward-dw-order",
    summary="delayed weight gradients are captured out of order, or read buffers that were handed on",
    symptom="wrong weight gradients, 'already owns a captured graph' or KeyError: -1, depending on the order",
    upstream=("https://github.com/NVIDIA/TransformerEngine/pull/2376",),
    affected=">=2.10",
    examine=examine,
    looks_like=("wgrad .grad", "wgrad main_grad"),
)
