"""``backward-dw-hooks``: after the replay of a delayed wgrad nobody is told that the gradient is ready.

Upstream: https://github.com/NVIDIA/TransformerEngine/pull/2614 (TE 2.13), reported as
https://github.com/NVIDIA/Megatron-LM/issues/2999

Symptom: Megatron's DDP waits for, or never reduces, gradients of captured layers with delayed wgrad.

`backward_dw` of a module ends with the hooks given to `register_wgrad_accumulation_and_reduce_hooks`; that of a graphed
callable only replays. It now runs the hooks of its modules after the replay, in the order in which the callable holds
its modules (TE 2.13 iterates a set, whose order may differ between ranks).

``not-needed``: behind the replay stands this package's loop, or upstream's with the base module's method.
``not-applicable``: graphed callables have no ``backward_dw``, as before TE 2.10.
"""

from __future__ import annotations

from ..fix import Fix, Verdict, applicable, not_applicable, not_needed
from ..shapes import graph_capture, lacks_delayed_wgrads
from ..source import Source
from .wgrad_hook_order import VISIT

REPLAY = "bwd_dw_graphs[graph_idx].replay()"

DEFECT = f"""
def backward_dw():
    if need_bwd_dw_graph.get(graph_idx, False):
        {REPLAY}
"""

HOOKS = """
# Tell whoever waits for the weight gradients.
for module in graph_callables[graph_idx].modules():
    if (
        module in visited_te_modules.get(graph_idx, ())
        and isinstance(module, TransformerEngineBaseModule)
        and module.need_backward_dw()
    ):
        for wgrad_accumulation_and_reduce_hook in module.wgrad_accumulation_and_reduce_hooks:
            wgrad_accumulation_and_reduce_hook()
"""

CORRECTED = f"""
{REPLAY}
...
{HOOKS}
"""

UPSTREAM = """
{}
...
for module in te_modules:
    if {} and module.need_backward_dw():
        module._trigger_wgrad_accumulation_and_reduce_hooks()
"""

MODULES = "te_modules = visited_te_modules.get(graph_idx, set())"

HAS_HOOKS = (
    "isinstance(module, TransformerEngineBaseModule)",
    'hasattr(module, "_trigger_wgrad_accumulation_and_reduce_hooks")',  # by delayed-wgrad-delivery
)

RUN_HOOKS = "for ANY_HOOK in self.wgrad_accumulation_and_reduce_hooks: ANY_HOOK()"


def examine(source: Source) -> Verdict:
    if lacks_delayed_wgrads(source):
        return not_applicable("graphs of delayed weight gradients are not captured")
    capture, base = graph_capture(source), source.module("transformer_engine.pytorch.module.base")
    replay = capture.inner("backward_dw")
    if not capture.has(DEFECT):
        capture.one('setattr(ret[-1], "backward_dw", backward_dw_func)')
        replays = (REPLAY, "bwd_dw_graph.replay()")
        upstream = [UPSTREAM.format(each, has_hooks) for each in replays for has_hooks in HAS_HOOKS]
        replay.one(CORRECTED, *upstream)
        if not replay.has(CORRECTED):
            capture.inner("make_graphed_attribute_functions").one(MODULES)
            capture.one(VISIT)
            base.definition("TransformerEngineBaseModule._trigger_wgrad_accumulation_and_reduce_hooks").one(RUN_HOOKS)
        return not_needed("the hooks are run after the replay")
    capture.one(DEFECT)
    capture.exactly(2, "graph_callables[ANY] = func")
    capture.one("visited_te_modules = {}")
    base.definition("TransformerEngineBaseModule.backward_dw").one(RUN_HOOKS)
    return applicable(
        "backward_dw of a graphed callable replays without running the hooks",
        [replay.insert_after(replay.one(REPLAY), HOOKS)],
    )


FIX = Fix(
    id="backward-dw-hooks",
    summary="replaying backward_dw skips the wgrad accumulation and reduce hooks",
    symptom="Megatron's DDP never sees the gradients of captured layers with delayed wgrad as ready",
    upstream=(
        "https://github.com/NVIDIA/TransformerEngine/pull/2614",
        "https://github.com/NVIDIA/Megatron-LM/issues/2999",
    ),
    affected=">=2.10,<2.13",
    examine=examine,
    looks_like=("hooks",),
)
