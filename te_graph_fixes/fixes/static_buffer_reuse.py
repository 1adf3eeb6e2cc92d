"""``static-buffer-reuse``: static buffers are handed on between layers whose buffers differ.

Upstream: open, TE 2.6 to main

Symptom: layers of several kinds in an ``_order`` with ``_reuse_graph_input_output_buffers``. A layer gets the input
buffer of one whose input needs no gradient, and its backward ends there: gradients off by 100 %, without an error. It
gets that of a layer whose two inputs were one tensor: wrong outputs. Its outputs that need a gradient are at other
places than those of a layer with the same number of them: gradients are zero, or an exception where one output is None.

Inputs are handed on by shape, dtype and layout alone. Their key now holds all that a buffer keeps of its sample: type,
device, strides, whether it needs a gradient, and which tensors of a sample are the same. (Inputs in an order with
wgrads: `te_graph_fixes/provided/graph_order.py`.) Buffers of grad outputs are put where this layer has outputs with
gradients.

``not-needed``: both changes stand where they would be made. ``not-applicable``: there is no parameter
``_reuse_graph_input_output_buffers``.
"""

from __future__ import annotations

from typing import cast

from ..fix import Fix, Verdict, not_applicable
from ..shapes import Changes, graph_capture, graph_interface, lacks_parameter, require_names
from ..source import Run, Source

REUSE = """
sample_keys = sample_args_keys + sample_kwargs_keys
...
fwd_sample_qs[m_chunk].append((sample_keys, per_callable_fwd_idx))
if consumed_sample_q.get(sample_keys, []):
    reuse_fwd_idx = consumed_sample_q[sample_keys].pop(0)
    ...
"""
KEEP = """
# Nor may a buffer differ in anything else that it keeps of its sample.
sample_kwargs_values = [v for _, v in sorted(sample_kwargs[per_callable_fwd_idx].items())]
sample_tensors = [*sample_args[per_callable_fwd_idx], *sample_kwargs_values]
sample_addresses = [t.data_ptr() for t in sample_tensors]
sample_keys += tuple(
    (type(t), t.device, t.stride(), t.requires_grad, sample_addresses.index(t.data_ptr()))
    for t in sample_tensors
)
"""

GRAD_OUTPUTS = "per_callable_static_grad_outputs[per_callable_bwd_idx] = static_grad_outputs"
PLACE = """
# They may have been made for a layer whose outputs without a gradient are at other places.
given_grad_outputs = iter([g for g in static_grad_outputs if g is not None])
static_grad_outputs = tuple(
    next(given_grad_outputs) if getattr(o, "requires_grad", False) else None for o in static_outputs
)
"""


def examine(source: Source) -> Verdict:
    if lacks_parameter(graph_interface(source), "_reuse_graph_input_output_buffers"):
        return not_applicable("static buffers are not reused")
    capture = graph_capture(source)
    require_names(capture, "sample_args", "sample_kwargs", "static_grad_outputs", "static_outputs")
    changes = Changes("static_grad_outputs")
    changes.after(capture, [cast(Run, capture.one(REUSE)).body[0]], KEEP)
    changes.before(capture, [capture.one(GRAD_OUTPUTS)], PLACE)
    return changes.verdict(
        "static buffers are handed on by shape, dtype and layout", "static buffers are handed on to what is alike"
    )


FIX = Fix(
    id="static-buffer-reuse",
    summary="static buffers are handed on between layers whose buffers differ",
    symptom="layers of several kinds in an _order, buffers reused: gradients off by 100 %, or wrong outputs",
    upstream=(),
    affected=">=2.6",
    examine=examine,
)
