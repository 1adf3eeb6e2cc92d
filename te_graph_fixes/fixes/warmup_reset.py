"""Bug: the first graph of a module contains the behavior of the first microbatch.

Upstream: https://github.com/NVIDIA/TransformerEngine/pull/2715 (TE 2.14)

After the warmup, `_make_graphed_callables` sets ``is_first_microbatch = True`` on every module that has the attribute.
Megatron's modules have it. The first graph of each module then records a first microbatch, so each replay of this
graph overwrites ``main_grad`` with its wgrad. The fix removes this loop over the modules.
"""

from ..fix import Fix

PATCH = """
@@ graph.py _make_graphed_callables
-for ANY_MODULE in func.modules():
-    if hasattr(ANY_MODULE, "is_first_microbatch"):
-        ANY_MODULE.is_first_microbatch = True
"""

UPSTREAM = """
@@ graph.py _make_graphed_callables (0 times)
 ANY_MODULE.is_first_microbatch = ANY
"""

FIX = Fix(
    symptom="fused wgrad: only the last microbatch reaches main_grad (wgrad norm ratio 0.577 for three microbatches)",
    group="gradients",
    affects="several microbatches with fused wgrads (Megatron's default), in modules with is_first_microbatch",
    merged="2.14",
    patch=PATCH,
    corrected=[(UPSTREAM, "warmup does not change is_first_microbatch")],
    requires=("grouped-linear-skip-flag", "param-grad-lifetime", "stale-fp8-weights"),
    check_hints=("backward main_grad",),
)
