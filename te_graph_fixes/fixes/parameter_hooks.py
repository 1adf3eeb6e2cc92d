"""``parameter-hooks``: hooks of parameters run in warmup and capture, and what they do becomes part of the graph.

Upstream: open, TE 2.7 to main.

Symptom: a ``register_post_accumulate_grad_hook`` that adds to a sum of its own counts each gradient twice (error 1.0);
one that takes ``.grad`` away is never called at replay, for its parameter seems to have no gradient; what
``register_hook`` does to a gradient is done twice. In warmup such hooks get what is in uninitialised memory.

Hooks run in warmup and capture, and again after each replay, when the gradients arrive at the parameters. They are now
put aside for the backwards of warmup and capture (`te_graph_fixes/provided/parameter_hooks.py`, shipped beside the
patched module).

`torch.cuda.make_graphed_callables` calls `torch.autograd.grad`, which leaves out the hooks of accumulation but not
those of ``register_hook``. TE did so up to 2.11; it cannot go back, for `te.checkpoint` within a graph refuses it.

``not-needed``: all of the changes below stand where they would be made.
"""

from __future__ import annotations

import ast
import textwrap
from functools import partial
from typing import cast

from ..fix import Fix, Verdict
from ..provided import new_module
from ..shapes import Changes, require_names, start_of_warmup
from ..source import Definition, Edit, Source, unrecognized

IMPORT = "from ._te_parameter_hooks import hooks_put_aside"

CAPTURE = "ANY_CONTEXT(bwd_graph, pool=mempool)"

WARMUP_TO_2_11 = """
grad_inputs = torch.autograd.grad(
    outputs=ANY_OUTPUTS,
    inputs=tuple(i for i in static_input_surface if i.requires_grad),
    grad_outputs=ANY_GRADS,
    only_inputs=True,
    allow_unused=allow_unused_input,
)
"""

PUT_ASIDE = "hooks_put_aside({})"

BACKWARDS = ("torch.autograd.backward", "torch.autograd.grad")


def examine(source: Source) -> Verdict:
    capture = source.definition("transformer_engine.pytorch.graph", "_make_graphed_callables")
    capture.exactly(3, *BACKWARDS)
    capture.exactly(2, "graph_callables[ANY] = func")
    require_names(capture, "per_callable_bwd_idx", "static_input_surface")
    backwards = {_warmup(capture): "func"}
    layer, callable_ = (capture.statement_with(node) for node in capture.exactly(2, CAPTURE))
    backwards[layer] = "graph_callables[per_callable_bwd_idx]"
    numbered = capture.has("reversed(range(len(per_callable_static_input_surfaces)))")
    require_names(capture, *["bwd_idx"] * numbered)
    # TE before 2.10 has no number there. It leaves out no parameters, either.
    backwards[callable_] = "graph_callables[bwd_idx]" if numbered else "static_input_surface"
    for node in backwards:
        capture.one(*BACKWARDS, within=node)
    changes = Changes()
    changes.before(capture, [start_of_warmup(capture)], IMPORT + "\n")
    for node, held in backwards.items():
        text = PUT_ASIDE.format(held)
        changes.add(_is_corrected(node, text), partial(_put_aside, capture, node, text))
    return changes.verdict(
        "hooks of parameters run in the backwards of warmup and capture",
        "hooks of parameters are put aside in warmup and capture",
        new_module(source, "parameter_hooks"),
    )


def _warmup(capture: Definition) -> ast.stmt:
    """The backward of warmup: a ``with`` statement, or, up to TE 2.11, an assignment that may be in one."""
    contexts = [capture.statement_with(node) for node in capture.all("_none_grad_context_wrapper(inputs)")]
    if not contexts:
        grads = cast(ast.stmt, capture.one(WARMUP_TO_2_11))
        return next((node for node in capture.nodes(ast.With) if node.body == [grads]), grads)
    captures = [capture.statement_with(node) for node in capture.all(CAPTURE)]
    found = [node for node in contexts if node not in captures]
    if len(found) != 1:
        raise unrecognized("one backward of warmup", capture, f"{len(found)}")
    return found[0]


def _is_corrected(node: ast.stmt, text: str) -> bool:
    return isinstance(node, ast.With) and text in map(ast.unparse, node.items)


def _put_aside(capture: Definition, node: ast.stmt, text: str) -> list[Edit]:
    if isinstance(node, ast.With):
        return [capture.enter_before(node.items[0].context_expr, text)]
    lines = textwrap.dedent(" " * node.col_offset + capture.text(node))
    return [capture.replace(node, f"with {text}:\n{textwrap.indent(lines, '    ')}")]


FIX = Fix(
    id="parameter-hooks",
    summary="hooks of parameters run in warmup and capture, and what they do becomes part of the graph",
    symptom="what post-accumulate hooks add up counts twice (1.0); hooks that take .grad away are never called",
    upstream=(),
    affected=">=2.7",
    examine=examine,
)
