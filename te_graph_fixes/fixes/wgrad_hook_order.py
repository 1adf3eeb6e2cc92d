"""``wgrad-hook-order``: after a replayed ``backward_dw``, ranks run their gradient hooks in different orders.

Upstream: open (the hooks came with https://github.com/NVIDIA/TransformerEngine/pull/2614)

Symptom: none on one rank. Megatron-Core's hooks start the reduction of a bucket once its last gradient is ready; where
two buckets get ready in one ``backward_dw``, as with weights larger than a bucket, ranks that start them in different
orders hang, or add up different buckets.

The modules of a callable are kept in a ``set``, whose order follows from memory addresses and differs between
processes. They are kept in a ``dict`` now, in the order of their forwards.

``not-needed``: all uses of ``modules`` are known, and fill a dict. ``not-applicable``: graphed callables have no
``backward_dw``, as before TE 2.10.
"""

from __future__ import annotations

from ..fix import Fix, Verdict, applicable, not_applicable, not_needed
from ..shapes import graph_capture, lacks_delayed_wgrads
from ..source import Source

VISIT = """
if func_idx not in visited_te_modules:
    visited_te_modules[func_idx] = modules
else:
    visited_te_modules[func_idx].update(modules)
"""


def examine(source: Source) -> Verdict:
    if lacks_delayed_wgrads(source):
        return not_applicable("graphs of delayed weight gradients are not captured")
    capture = graph_capture(source)
    capture.one(VISIT)
    additions, corrected = capture.matches("modules.add(ANY_MODULE)"), capture.matches("modules[ANY_MODULE] = None")
    # Of other uses there are the definition, `if modules:` and two in VISIT.
    capture.exactly(len(additions) + len(corrected) + 4, "modules")
    if corrected:
        capture.one("modules = {}")
        capture.exactly(0, "modules.add(ANY_MODULE)")
        return not_needed("the modules of a callable are in the order of their forwards")
    return applicable(
        "the modules of a callable are in no order",
        [
            capture.replace(capture.one("modules = set()"), "modules = {}  # in the order of their forwards"),
            *(capture.replace(add.node, f"modules[{capture.text(add['ANY_MODULE'])}] = None") for add in additions),
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
