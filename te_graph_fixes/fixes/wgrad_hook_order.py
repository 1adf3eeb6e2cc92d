"""Bug: after a replayed ``backward_dw``, ranks run their gradient hooks in different orders.

Upstream: none yet (the hooks came with https://github.com/NVIDIA/TransformerEngine/pull/2614)

TE stores the modules of a callable in a ``set``, whose order depends on memory addresses and differs between processes.
Megatron-Core's hooks start the reduction of a bucket once its last gradient is ready. If two buckets become ready in
one ``backward_dw``, as with weights larger than a bucket, ranks start the reductions in different orders. With the fix,
the modules are in a ``dict``, in the order of their forwards.
"""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables
-modules = set()
+modules = {}  # in the order of their forwards
@@ (3 times)
-modules.add(ANY_MODULE)
+modules[ANY_MODULE] = None
@@
 modules = ANY
@@ (0 times)
 modules.update(...)
"""

FIX = Fix(
    symptom="ranks run their gradient hooks in different orders: hangs, or sums of different buckets",
    group="pipelines and delayed wgrads",
    affects="several ranks with Megatron --delay-wgrad-compute and its DDP",
    patch=PATCH,
)
