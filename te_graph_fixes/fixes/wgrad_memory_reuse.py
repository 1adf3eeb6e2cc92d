"""``wgrad-memory-reuse``: where callables are captured together, a dgrad writes what another's delayed wgrad reads.

Upstream: open, TE 2.10 to main

Symptom: ``make_graphed_callables((a, b), ...)`` without ``_order``, modules with ``delay_wgrad_compute``: weight
gradients of all callables but the first are off by 100 % or inf, without an error (1.0 on the simulator).

The wgrad of each callable is captured right after its dgrad, and what it reads goes back to the pool, where the dgrad
of the callable before it takes it. Autograd replays all dgrads before anybody can call ``backward_dw``. Wgrads are
captured after all dgrads now, in a pool of their own, so that they may be replayed in any order too.

``not-needed``: the wgrads are captured by the functions that `DEFER` begins, behind the dgrads. ``not-applicable``:
graphed callables have no ``backward_dw``, as before TE 2.10.
"""

from __future__ import annotations

import ast
from typing import cast

from ..fix import Fix, Verdict, not_applicable
from ..shapes import Changes, graph_capture, lacks_delayed_wgrads
from ..source import Definition, Edit, Source

DGRADS = """
for static_input_surface, static_outputs, bwd_graph, bwd_dw_graph, bwd_idx in ANY_GRAPHS:
    ...
"""
WGRAD = """
if need_bwd_dw_graph[bwd_idx]:
    with _graph_context_wrapper(bwd_dw_graph, pool=mempool):
        ...
"""
BEGIN = "wgrad_captures, wgrad_pool = [], graph_pool_handle()"
DEFER = "def capture_wgrad(bwd_dw_graph=bwd_dw_graph, bwd_idx=bwd_idx, mempool=wgrad_pool)"
NOTE = "if need_bwd_dw_graph[bwd_idx]: wgrad_captures.append(capture_wgrad)"
END = """
# Autograd replays the dgrads of all callables before a wgrad: none may write what a wgrad reads.
for capture_wgrad in wgrad_captures:
    capture_wgrad()
"""
DEFERRED = f"{DEFER}:\n    with _graph_context_wrapper(bwd_dw_graph, pool=mempool): ..."


def examine(source: Source) -> Verdict:
    if lacks_delayed_wgrads(source):
        return not_applicable("graphs of delayed weight gradients are not captured")
    capture = graph_capture(source)
    capture.module.definition("graph_pool_handle")
    dgrads = capture.one(DGRADS)
    deferred = capture.has(DEFERRED)
    wgrad = cast(ast.If, capture.one(DEFERRED if deferred else WGRAD, within=dgrads))
    changes = Changes()
    changes.before(capture, [dgrads], BEGIN)
    changes.text(capture, f"{DEFER}: ...")
    changes.add(deferred, lambda: [_defer(capture, wgrad)])
    changes.after(capture, [wgrad], NOTE)
    changes.after(capture, [dgrads], END)
    return changes.verdict(
        "a wgrad reads memory that a dgrad which is captured later, and replayed earlier, was given",
        "wgrads are captured after all dgrads, in a pool of their own",
    )


def _defer(capture: Definition, wgrad: ast.If) -> Edit:
    """Let the statements below the ``if`` be those of a function."""
    (start, _), (_, end) = map(capture.module.span, (wgrad, wgrad.test))
    return Edit(capture.module.name, start, end, DEFER)


FIX = Fix(
    id="wgrad-memory-reuse",
    summary="delayed wgrads of callables captured together read memory that a dgrad was given",
    symptom="several callables in one capture without _order: delayed weight gradients off by 100 % or inf",
    upstream=(),
    affected=">=2.10",
    examine=examine,
    looks_like=("wgrad .grad",),
)
