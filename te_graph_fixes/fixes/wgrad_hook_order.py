"""``wgrad-hook-order``: after a replayed ``backward_dw``, ranks run their gradient hooks in different orders.

Upstream: open, TE 2.13 to main (the hooks came with https://github.com/NVIDIA/TransformerEngine/pull/2614)

Symptom: none on one rank. Megatron-Core's hooks start the reduction of a bucket once its last gradient is ready; where
two buckets get ready in one ``backward_dw``, as with weights larger than a bucket, ranks that start them in different
orders hang, or add up different buckets.

The modules of a callable are kept in a ``set``, whose order follows from memory addresses and differs between
processes. They are kept in a ``dict`` now, in the order of their forwards.
"""

from __future__ import annotations

import ast
from typing import cast

from ..fix import Fix, Verdict, applicable, not_applicable, not_needed
from ..source import Source, UnrecognizedError

VISIT = """
if func_idx not in visited_te_modules:
    visited_te_modules[func_idx] = modules
else:
    visited_te_modules[func_idx].update(modules)
"""


def examine(source: Source) -> Verdict:
    capture = source.definition("transformer_engine.pytorch.graph", "_make_graphed_callables")
    if "backward_dw" not in capture.text(capture.node):
        return not_applicable("graphs of delayed weight gradients are not captured")
    capture.one(VISIT)
    additions = capture.all("modules.add(ANY_MODULE)")
    if capture.has("modules = {}") and not additions:
        return not_needed("the modules of a callable are in the order of their forwards")
    if not additions:
        raise UnrecognizedError(f"looked for modules.add() in {capture.qualname} ({capture.module.path}), found none")
    # Of other uses there are its definition, `if modules:` and two in VISIT.
    if len(capture.all("modules")) != len(additions) + 4:
        raise UnrecognizedError(
            f"looked for modules.add() and the set's known uses in {capture.qualname} ({capture.module.path}), "
            "found others"
        )
    return applicable(
        "the modules of a callable are in no order",
        [
            capture.replace(capture.one("modules = set()"), "modules = {}  # in the order of their forwards"),
            *(
                capture.replace(node, f"modules[{capture.text(cast(ast.Call, node).args[0])}] = None")
                for node in additions
            ),
        ],
    )


FIX = Fix(
    id="wgrad-hook-order",
    summary="after a replayed backward_dw, ranks run their gradient hooks in different orders",
    symptom="hangs, or sums of different buckets, where two gradient buckets get ready in one backward_dw",
    upstream=("https://github.com/NVIDIA/TransformerEngine/pull/2614",),
    affected=">=2.10",
    examine=examine,
)
