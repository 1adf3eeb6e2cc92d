"""``param-grad-lifetime``: parameter grads that a graph returns are overwritten by the next replay.

Upstream: https://github.com/NVIDIA/TransformerEngine/pull/2937 (TE 2.19)

Symptom: plain ``.grad`` accumulation over microbatches is off by about 1.0; so are biases and norm weights where only
the weights' wgrad is fused. A grad that a hook keeps changes under it.

`Graphed.backward` returns the graph's static buffers; autograd adopts them as ``.grad``. Parameter grads are now
returned as copies. Not copied are the grads of user inputs, and dummies that stand for a wgrad in ``main_grad``
(``grad_added_to_main_grad``, with and without ``skip_backward_post_hook``). This is settled once, as the capture ends.
The keyword ``clone_param_grads_on_return=False``, the same as in TE 2.19, turns it off.
"""

from __future__ import annotations

import ast
from typing import cast

from ..fix import Fix, Verdict, applicable, not_needed
from ..source import Definition, Edit, Source, UnrecognizedError

OPTION = "clone_param_grads_on_return"

RETURNED = "tuple(b.detach() if b is not None else b for b in static_grad_inputs)"

RETURNED_COPIES = """
tuple(
    grad if grad is None else grad.detach().clone() if copied else grad.detach()
    for grad, copied in zip(static_grad_inputs, copied_grads)
)
"""

COPIED_GRADS = f"""
# Which grads to return as copies: those of parameters, except dummies that stand for a wgrad in main_grad.
copied_grads = tuple(
    {OPTION} and index >= len_user_args and not getattr(arg, "grad_added_to_main_grad", False)
    for index, arg in enumerate(static_input_surface)
)

"""


def examine(source: Source) -> Verdict:
    module = source.module("transformer_engine.pytorch.graph")
    public, capture = module.definition("make_graphed_callables"), module.definition("_make_graphed_callables")
    call = _capture_call(public)
    if OPTION in module.text:
        public.require_parameters(OPTION)
        capture.require_parameters(OPTION)
        if OPTION not in {keyword.arg for keyword in call.keywords}:
            raise UnrecognizedError(
                f"looked for {OPTION} in the call of {capture.qualname} ({module.path}), found none"
            )
        capture.one("ANY_GRAD.detach().clone()")
        return not_needed("parameter grads are returned as copies")
    if capture.has("ANY_GRAD.clone()"):
        raise UnrecognizedError(f"looked for no clone() in {capture.qualname} ({module.path}), found one")
    factory = capture.inner("make_graphed_autograd_function")
    factory.require_parameters("len_user_args", "static_input_surface", "static_grad_inputs")
    graphed = factory.inner("Graphed")
    return applicable(
        "graphs return their static buffers as parameter grads",
        [
            _append(public, _last_default(public), f"{OPTION}: bool = True"),
            _append(capture, _last_default(capture), f"{OPTION}: bool = True"),
            _append(public, call.keywords[-1].value, f"{OPTION}={OPTION}"),
            factory.insert_before(graphed.node, COPIED_GRADS),
            graphed.replace(graphed.one(RETURNED), RETURNED_COPIES),
        ],
    )


def _capture_call(public: Definition) -> ast.Call:
    calls = [
        node
        for node in ast.walk(public.node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_make_graphed_callables"
    ]
    if len(calls) != 1 or not calls[0].keywords or any(keyword.arg is None for keyword in calls[0].keywords):
        raise UnrecognizedError(f"looked for one call of _make_graphed_callables with keywords in {public.module.path}")
    return calls[0]


def _last_default(definition: Definition) -> ast.expr:
    arguments = cast(ast.FunctionDef, definition.node).args
    defaults = [*arguments.defaults, *(default for default in arguments.kw_defaults if default)]
    if not defaults:
        raise UnrecognizedError(f"looked for parameters with defaults of {definition.qualname}, found none")
    return defaults[-1]


def _append(definition: Definition, node: ast.expr, text: str) -> Edit:
    """Put ``text`` after ``node``, the last of a comma-separated list that has one entry a line."""
    end = definition.module.offset(cast(int, node.end_lineno), cast(int, node.end_col_offset))
    start = definition.module.line_start(node.lineno)
    line = definition.module.text[start:end]
    indent = line[: len(line) - len(line.lstrip())]
    return Edit(definition.module.name, end, end, f",\n{indent}{text}")


FIX = Fix(
    id="param-grad-lifetime",
    summary="parameter grads that a graph returns are overwritten by its next replay",
    symptom="plain .grad accumulation over three microbatches off by 1.0; biases and norm weights with fused wgrad too",
    upstream=("https://github.com/NVIDIA/TransformerEngine/pull/2937",),
    affected="<2.19",
    examine=examine,
    looks_like=("grad-overwritten",),
)
