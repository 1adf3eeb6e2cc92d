"""``fused-dummy-copies``: parameter grads that nobody reads are copied at each replay.

Upstream: none yet, TE 2.19 to main. https://github.com/NVIDIA/TransformerEngine/pull/2937 names the loss,
https://github.com/NVIDIA/Megatron-LM/pull/5893 switches all copies off in Megatron-LM; no release up to 0.19.2 has it.

From TE 2.19 on `Graphed.backward` copies every parameter grad that it returns: with experts of 4096 to 14336 on an H200
2.84 ms instead of 2.33, and copies as large as the weights are alive at the peak. A grad that is a dummy in this graph
is now returned as TE's shared dummy, without a copy and without memory in the graph's pool. It is a dummy if this
graph's backward has set ``grad_added_to_main_grad``; a mark that another graph has left does not count. A replay takes
0.81 to 0.95 of its time without the fix. `param-grad-lifetime` does the same for TE before 2.19.
"""

from ..fix import Fix
from ..patching.source import Source
from .shapes import SHARE_DUMMIES

PATCH = """
@@ graph.py _make_graphed_callables._returned_param_grad_clone_slots
 if not clone_param_grads_on_return:
     return (False,) * len(static_grad_inputs)
 module_param_start = len(static_grad_inputs) - len(module_params)
 return tuple(ANY_CHOICE for idx in range(len(static_grad_inputs)))
@@
-idx >= module_param_start and not ANY_ALIASED
+idx >= module_param_start and not ANY_ALIASED \
and not is_shared_dummy(static_grad_inputs[idx], module_params[idx - module_param_start])
@@ graph.py _make_graphed_callables (2 times)
 _returned_param_grad_clone_slots(ANY, ANY, ...)
"""


def lacks_option(source: Source) -> bool:
    """Whether parameter grads are returned as they are, as before TE 2.19."""
    function = source.module("transformer_engine.pytorch.graph").definition("make_graphed_callables")
    return "clone_param_grads_on_return" not in function.parameters


FIX = Fix(
    symptom="fused wgrad: the backward takes 15 to 20 % longer, and needs the weights' size again in memory",
    group="speed",
    users="fuse_wgrad_accumulation (Megatron-Core gradient_accumulation_fusion)",
    affected=">=2.19",
    patch=SHARE_DUMMIES + PATCH,
    absent=[(lacks_option, "TE before 2.19 copies no parameter grads")],
    provides=("fused_wgrads",),
)
