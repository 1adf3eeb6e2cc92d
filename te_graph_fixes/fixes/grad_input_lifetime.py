"""``grad-input-lifetime``: a grad input is overwritten while it is still being sent to the previous pipeline stage.

Upstream: https://github.com/NVIDIA/Megatron-LM/issues/5966 (open; that this is its cause is inference)

Symptom: with ``--overlap-moe-expert-parallel-comm``, virtual pipeline stages of two or more layers and TE graphs,
gradients turn to garbage (norm 13 becomes 6e6) as soon as a stage receives some milliseconds late.

With ``_reuse_graph_input_output_buffers``, `_make_graphed_callables` gives a chunk's static grad input back to the
graph pool once the next chunk's dgrad is captured, for by then Megatron-Core has waited for the send. Where every layer
is passed as a chunk, Megatron waits only after the next *model* chunk's backward, and graphs captured in between write
into the buffer. The gradients of the caller's inputs are released where `grad_input_releases` says instead; those of
parameters stay with TE's rule.

``not-needed``: plan and both releases stand in the capture's loop, TE's own release nowhere. ``not-applicable``: there
is no parameter ``_reuse_graph_input_output_buffers``.
"""

from __future__ import annotations

import ast
from typing import cast

from ..fix import Fix, Verdict, applicable, not_applicable, not_needed
from ..provided import plan_module
from ..shapes import BACKWARD_INDEX, graph_capture, graph_interface, lacks_parameter, require_names
from ..source import Definition, Node, Source, unrecognized

START = "previous_chunk_last_callable_bwd_idx = None"
LOOP = """
for ANY_TARGET in ANY_ORDER:
    if c_id > 0:
        ...
    else:
        m_chunk = ANY_CHUNK
        previous_per_callable_bwd_idx = None
        ...
"""
PLANNED_LOOP = """
for ANY_TARGET in ANY_ORDER:
    if _reuse_graph_input_output_buffers:
        ...
    if c_id > 0:
        ...
    else:
        ...
"""
INNER_RELEASE = """
if previous_per_callable_bwd_idx is not None:
    idx = previous_per_callable_bwd_idx
    per_callable_static_grad_inputs[idx] = make_weak_ref(per_callable_static_grad_inputs[idx])
previous_per_callable_bwd_idx = per_callable_bwd_idx
"""
RELEASE = """
if l_no == 0:
    if previous_chunk_last_callable_bwd_idx is not None:
        idx = previous_chunk_last_callable_bwd_idx
        per_callable_static_grad_inputs[idx] = make_weak_ref(per_callable_static_grad_inputs[idx])
    previous_chunk_last_callable_bwd_idx = per_callable_bwd_idx
"""
USER_ARGS = "per_callable_len_user_args = [len(args) for args in flatten_sample_args]"
GRAD_INPUTS = "per_callable_static_grad_inputs[per_callable_bwd_idx] = static_grad_inputs"
PLANNED_INDEX = "per_callable_bwd_idx = _order_plan.index(i, l_no)"  # by backward-dw-order

PLAN = """
if _reuse_graph_input_output_buffers:
    from ._te_graph_order import grad_input_releases

    released_grad_inputs = iter(grad_input_releases(_order, _num_layers_per_chunk))
"""
PLANNED_RELEASE = """
if _reuse_graph_input_output_buffers:
    for idx in next(released_grad_inputs):
        per_callable_static_grad_inputs[idx] = make_weak_ref(per_callable_static_grad_inputs[idx])
"""
PARAMETERS_RELEASE = """
if l_no == 0:
    if previous_chunk_last_callable_bwd_idx is not None:
        idx = previous_chunk_last_callable_bwd_idx
        # Of the inputs' grads, released_grad_inputs says when they have been read.
        num_user_args = per_callable_len_user_args[idx]
        per_callable_static_grad_inputs[idx] = per_callable_static_grad_inputs[idx][
            :num_user_args
        ] + make_weak_ref(per_callable_static_grad_inputs[idx][num_user_args:])
    previous_chunk_last_callable_bwd_idx = per_callable_bwd_idx
"""


def examine(source: Source) -> Verdict:
    capture = graph_capture(source)
    if lacks_parameter(graph_interface(source), "_reuse_graph_input_output_buffers"):
        return not_applicable("static buffers are not reused")
    if not plan_module(source) and all(capture.has(pattern) for pattern in (PLAN, PLANNED_RELEASE, PARAMETERS_RELEASE)):
        loop = capture.one(PLANNED_LOOP)
        capture.one(f"{START}\n{PLAN}\n{PLANNED_LOOP}")
        _require_order(capture, loop)
        capture.one(USER_ARGS)
        capture.one(GRAD_INPUTS, within=loop)
        capture.one(INNER_RELEASE + PARAMETERS_RELEASE, within=loop)
        capture.one(PLANNED_RELEASE, within=loop)
        capture.exactly(0, RELEASE)
        return not_needed("grad inputs are held until their last reader")
    require_names(capture, "_reuse_graph_input_output_buffers")
    loop = _loop(capture)
    capture.one(USER_ARGS)
    if not capture.has(PLANNED_INDEX, within=loop):
        capture.one(BACKWARD_INDEX, within=loop)
    capture.one(GRAD_INPUTS, within=loop)
    capture.one(INNER_RELEASE + RELEASE, within=loop)
    return applicable(
        "grad inputs are released at the next chunk's dgrad, though a chunk may be one layer of a model chunk",
        [
            capture.insert_before(loop, PLAN),
            capture.insert_before(loop.body[0], PLANNED_RELEASE),
            capture.replace(capture.one(RELEASE, within=loop), PARAMETERS_RELEASE),
        ],
        plan_module(source),
    )


def _loop(capture: Definition) -> ast.For:
    """The loop that captures the entries of the order, one after the other."""
    loop = cast(ast.For, capture.one(LOOP))
    capture.one(START + LOOP)
    _require_order(capture, loop)
    return loop


def _require_order(capture: Definition, loop: Node) -> None:
    loop = cast(ast.For, loop)
    if ast.unparse(loop.iter) not in ("_order", "enumerate(_order)"):
        raise unrecognized("a loop over _order", capture, f"one over {ast.unparse(loop.iter)}")


FIX = Fix(
    id="grad-input-lifetime",
    summary="grad inputs are overwritten while they are sent, where every layer is passed as a chunk",
    symptom="gradient norms of millions once a pipeline stage is late, with EP overlap and virtual stages",
    upstream=("https://github.com/NVIDIA/Megatron-LM/issues/5966",),
    affected=">=2.7",
    examine=examine,
    looks_like=("sent overwritten",),
)
