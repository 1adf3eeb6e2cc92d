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

from ..fix import Fix, Verdict
from ..provided import new_module
from ..shapes import BACKWARD_CAPTURE, Changes, ahead, graph_capture, require_names, start_of_warmup, warmup_backward
from ..source import Definition, Edit, Source

IMPORT = "from ._te_parameter_hooks import hooks_put_aside"

PUT_ASIDE = "hooks_put_aside({})"

BACKWARDS = ("torch.autograd.backward", "torch.autograd.grad")


def examine(source: Source) -> Verdict:
    capture = graph_capture(source)
    capture.exactly(3, *BACKWARDS)
    capture.exactly(2, "graph_callables[ANY] = func")
    require_names(capture, "per_callable_bwd_idx", "static_input_surface")
    backwards = {warmup_backward(capture): "func"}
    layer, callable_ = (capture.statement_with(match.node) for match in capture.exactly(2, BACKWARD_CAPTURE))
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
        changes.text(capture, text)
        changes.add(_is_corrected(node, text), partial(_put_aside, capture, node, text))
    return changes.verdict(
        "hooks of parameters run in the backwards of warmup and capture",
        "hooks of parameters are put aside in warmup and capture",
        new_module(source, "parameter_hooks"),
    )


def _is_corrected(node: ast.stmt, text: str) -> bool:
    return isinstance(node, ast.With) and text in map(ast.unparse, node.items)


def _put_aside(capture: Definition, node: ast.stmt, text: str) -> list[Edit]:
    if isinstance(node, ast.With):
        return [ahead(capture, node.items[0].context_expr, f"{text}, ")]
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
