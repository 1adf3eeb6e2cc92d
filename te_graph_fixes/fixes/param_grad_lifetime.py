"""``param-grad-lifetime``: parameter grads that a graph returns are overwritten by the next replay.

Upstream: https://github.com/NVIDIA/TransformerEngine/pull/2937 (TE 2.19)

Symptom: plain ``.grad`` accumulation over microbatches is off by about 1.0; so are biases and norm weights where only
the weights' wgrad is fused. A grad that a hook keeps changes under it.

`Graphed.backward` returns the graph's static buffers; autograd adopts them as ``.grad``. Parameter grads are now
returned as copies. Not copied are the grads of user inputs, and dummies that stand for a wgrad in ``main_grad``: what
this graph's backward marks with ``grad_added_to_main_grad`` is returned as TE's shared dummy, which is in no graph's
memory (`te_graph_fixes/provided/fused_wgrads.py`, shipped beside the patched module). This is settled once, as the
capture ends. Vectors (biases, norm weights) are copied by one kernel. The keyword
``clone_param_grads_on_return=False``, the same as in TE 2.19, turns the copies off.

``not-needed``: the option is True unless the caller says otherwise, gets to the capture, and what it selects is cloned.
"""

from __future__ import annotations

import ast
from typing import cast

from ..fix import Fix, Verdict, applicable, not_needed
from ..provided import new_module
from ..shapes import behind, require_names, require_own, start_of_warmup
from ..source import Definition, Edit, Source, unrecognized
from .delayed_wgrad_delivery import COPY_BIASES, NO_COPY
from .fused_dummy_copies import CHOICE, COPIED, NO_DUMMY, OPTION, has_sharing, share_edits

RETURNED = "tuple(b.detach() if b is not None else b for b in static_grad_inputs)"

RETURNED_COPIES = "returned_grads()"

COPIED_GRADS = f"""
# Which grads to return as copies: those of parameters, except dummies that stand for a wgrad in main_grad.
copied_grads = tuple(
    {OPTION}
    and index >= len_user_args
    and not is_shared_dummy(static_grad_inputs[index], static_input_surface[index])
    for index in range(len(static_grad_inputs))
)
returned_grads = ReturnedGrads(static_grad_inputs, copied_grads)

"""

CLONED = """
for idx, grad_input in enumerate(static_grad_inputs):
    if grad_input is None:
        grad_inputs.append(ANY)
    elif returned_param_grad_clone_slots[idx]:
        grad_inputs.append(grad_input.detach().clone())
    else:
        grad_inputs.append(ANY)
"""


SLOTS = (
    "returned_param_grad_clone_slots = ANY",
    "per_callable_returned_param_grad_clone_slots[per_callable_bwd_idx] = returned_param_grad_clone_slots",
    "per_callable_returned_param_grad_clone_slots.append(_returned_param_grad_clone_slots(ANY, ANY))",
    "per_callable_returned_param_grad_clone_slots[i]",
)
"""How which grads to copy gets from the two places of capture to `CLONED`."""


def examine(source: Source) -> Verdict:
    module = source.module("transformer_engine.pytorch.graph")
    public, capture = module.definition("make_graphed_callables"), module.definition("_make_graphed_callables")
    call = _capture_call(public)
    factory = capture.inner("make_graphed_autograd_function")
    require_names(factory, "len_user_args", "static_input_surface", "static_grad_inputs")
    graphed = factory.inner("Graphed")
    if OPTION in module.text:
        _require_option(public, capture, call)
        if factory.has(COPIED_GRADS):
            graphed.one(RETURNED_COPIES)
            graphed.exactly(0, RETURNED)
            start_of_warmup(capture)
            if not has_sharing(capture):
                raise unrecognized("dummies that are shared", capture)
            require_own([(capture, "", True)])
        else:
            slots = capture.inner("_returned_param_grad_clone_slots")
            slots.one(COPIED)
            choices = [CHOICE.replace("ANY_ALIASED", aliased) for aliased in (NO_COPY, COPY_BIASES)]
            slots.one(*choices, *(f"{choice} and {NO_DUMMY}" for choice in choices))
            graphed.one(CLONED)
            for pattern in SLOTS:
                capture.one(pattern)
            capture.exactly(2, "_returned_param_grad_clone_slots(ANY, ANY)")
            require_names(factory, "returned_param_grad_clone_slots")
        return not_needed("parameter grads are returned as copies")
    if capture.has("ANY_GRAD.clone()"):
        raise unrecognized("no clone()", capture, "one")
    return applicable(
        "graphs return their static buffers as parameter grads",
        [
            _append(public, _last_default(public), f"{OPTION}: bool = True"),
            _append(capture, _last_default(capture), f"{OPTION}: bool = True"),
            _append(public, call.keywords[-1].value, f"{OPTION}={OPTION}"),
            *share_edits(capture),
            factory.insert_before(graphed.node, COPIED_GRADS),
            graphed.replace(graphed.one(RETURNED), RETURNED_COPIES),
        ],
        new_module(source, "fused_wgrads"),
    )


def _require_option(public: Definition, capture: Definition, call: ast.Call) -> None:
    """Raise `UnrecognizedError` unless copies are made where the caller says nothing, and as the caller says."""
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if given.get(OPTION) != OPTION:
        raise unrecognized(f"{OPTION}={OPTION} in the call of {capture.qualname}", public, given.get(OPTION, "none"))
    for definition in (public, capture):
        default = _default(definition, OPTION)
        if default != "True":
            raise unrecognized(f"{OPTION}: bool = True", definition, default)
        for node in definition.nodes(ast.Name, OPTION):
            if not isinstance(node.ctx, ast.Load):
                raise unrecognized(f"{OPTION} as it was given", definition, f"an assignment (line {node.lineno})")


def _default(definition: Definition, parameter: str) -> str:
    arguments = cast(ast.FunctionDef, definition.node).args
    by_position = zip(reversed(arguments.args), reversed(arguments.defaults), strict=False)
    pairs = [*by_position, *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return next((ast.unparse(value) for name, value in pairs if value and name.arg == parameter), "none")


def _capture_call(public: Definition) -> ast.Call:
    calls = [node for node in public.nodes(ast.Call, "_make_graphed_callables") if isinstance(node.func, ast.Name)]
    if len(calls) != 1 or not calls[0].keywords or any(keyword.arg is None for keyword in calls[0].keywords):
        raise unrecognized("one call of _make_graphed_callables with keywords", public)
    return calls[0]


def _last_default(definition: Definition) -> ast.expr:
    arguments = cast(ast.FunctionDef, definition.node).args
    defaults = [*arguments.defaults, *(default for default in arguments.kw_defaults if default)]
    if not defaults:
        raise unrecognized("parameters with defaults", definition)
    return defaults[-1]


def _append(definition: Definition, node: ast.expr, text: str) -> Edit:
    """Put ``text`` after ``node``, the last of a comma-separated list that has one entry a line."""
    line = definition.module.line(node.lineno)
    return behind(definition, node, f",\n{line[: len(line) - len(line.lstrip())]}{text}")


FIX = Fix(
    id="param-grad-lifetime",
    summary="parameter grads that a graph returns are overwritten by its next replay",
    symptom="plain .grad accumulation over three microbatches off by 1.0; biases and norm weights with fused wgrad too",
    upstream=("https://github.com/NVIDIA/TransformerEngine/pull/2937",),
    affected="<2.19",
    examine=examine,
    looks_like=("use overwritten",),
)
