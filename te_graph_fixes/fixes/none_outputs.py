"""``none-outputs``: a callable with an output that is None cannot be graphed.

Upstream: https://github.com/NVIDIA/TransformerEngine/pull/2657 (TE 2.13)

Symptom: ``AttributeError: 'NoneType' object has no attribute 'requires_grad'`` in `make_graphed_callables`, for example
with vision encoders.

`_make_graphed_callables` takes every output for a tensor. Outputs that are None are now left out of what is captured,
and put back into what a replay returns.

``not-needed``: upstream tests for None in all of its seven places, or this package's texts are in all of theirs.
"""

from __future__ import annotations

from typing import Any, cast

from ..fix import Fix, Verdict, applicable, not_needed
from ..shapes import graph_capture
from ..source import Source

FORWARDS = (
    """
    ANY_OUTPUTS = ANY_FORWARD
    for hook in hooks:
        hook.remove()
    """,
    """
    try:
        ANY_OUTPUTS = ANY_FORWARD
    finally:
        for hook in hooks:
            hook.remove()
    """,
)
"""The forward of the warmup, TE's own and that of `capture-exception-safety`."""

BACKWARD = """
    if is_training:
        ...
    else:
        ...
"""

FLATTEN = "flatten_outputs, spec = _tree_flatten(outputs)"

TENSORS_ONLY = "outputs = [o for o in outputs if o is not None]"

LEAVE_OUT = """
# Outputs that are None have no part in the graph.
spec = (spec, [o is None for o in flatten_outputs])
flatten_outputs = [o for o in flatten_outputs if o is not None]
"""

ASKED_AT_REPLAY = "any(o is not None and o.requires_grad for o in out)"  # by backward-amax-reduction

RETURN = "return _tree_unflatten(out, output_unflatten_spec)"

PUT_BACK = """
spec, is_none = output_unflatten_spec
out = iter(out)
return _tree_unflatten([None if none else next(out) for none in is_none], spec)
"""


def examine(source: Source) -> Verdict:
    capture = graph_capture(source)
    if capture.has("tuple(o.detach() if o is not None else o for o in static_outputs)"):
        asked = 7 + len(capture.all(ASKED_AT_REPLAY))
        capture.exactly(asked, "o is not None and o.requires_grad")
        capture.exactly(asked, "o.requires_grad")
        return not_needed("outputs may be None")
    if capture.has(PUT_BACK):
        capture.one(*(f"{forward}...\n    {TENSORS_ONLY}" for forward in FORWARDS))
        capture.exactly(0, RETURN)
        capture.exactly(2, FLATTEN + LEAVE_OUT)
        return not_needed("outputs that are None are left out of what is captured")
    capture.one("tuple(o.detach() for o in static_outputs)")
    capture.one("per_callable_static_outputs.append(tuple(flatten_outputs))")
    capture.one("per_callable_static_outputs[per_callable_fwd_idx] = tuple(flatten_outputs)")
    flatten = capture.exactly(2, FLATTEN)
    backward = cast(Any, capture.one(*(forward + BACKWARD for forward in FORWARDS))).body[-1]
    return applicable(
        "every output is taken for a tensor",
        [
            capture.insert_before(backward, TENSORS_ONLY),
            *(capture.insert_after(match.node, LEAVE_OUT) for match in flatten),
            capture.replace(capture.one(RETURN), PUT_BACK),
        ],
    )


FIX = Fix(
    id="none-outputs",
    summary="a callable with an output that is None cannot be graphed",
    symptom="AttributeError: 'NoneType' object has no attribute 'requires_grad' in make_graphed_callables",
    upstream=("https://github.com/NVIDIA/TransformerEngine/pull/2657",),
    affected="<2.13",
    examine=examine,
)
