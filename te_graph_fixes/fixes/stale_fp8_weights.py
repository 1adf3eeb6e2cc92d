"""``stale-fp8-weights``: graphs go on with the FP8 weights of their capture.

Upstream: open, TE 2.9 to main; https://github.com/NVIDIA/TransformerEngine/pull/3298 is about the second case.

Symptom: after an optimizer step the outputs of graphed FP8 modules are off by about 1.0, because weights are not
quantized again. It happens

1. to modules that carry ``is_first_microbatch``, as Megatron-Core's do, where the capture does not cache weights
   (``cache_quantized_params=False``; Megatron-Core does not where attention is not captured). Warmup leaves False
   behind, and without the graph's skip flag False means that weights are never quantized. It now means what it means
   for wgrads: quantize, and accumulate. Before TE 2.14 it needs `warmup-reset` to show;
2. to a capture that does not cache weights, after one that does: it reads the skip flag of the other;
3. where another FP8 module runs before the graph in the same autocast: the graph does not set the skip flag, which
   still has the value of another graph or microbatch. Every graph that caches weights sets it now.

``not-needed``: all of the changes below stand where they would be made. ``not-applicable``: there is neither
quantization.py nor ``cache_quantized_params``, as before TE 2.9.
"""

from __future__ import annotations

from ..fix import Fix, Verdict, not_applicable
from ..shapes import MODULES, Changes, lacks_quantization, require_names, skip_flag_state, start_of_warmup
from ..source import Source

GRAD_MODE = "ANY_FLAG = torch.is_grad_enabled()"

QUANTIZE = """
if is_first_microbatch is False:
    from ..graph import is_graph_capturing as is_capturing

    # Captured without a skip flag, "not the first microbatch" would mean that weights are never quantized.
    if is_capturing() and {state}.skip_fp8_weight_update_tensor is None:
        is_first_microbatch = None

"""

OWN_FLAG = """
@contextlib.contextmanager
def own_skip_flag():
    # Captures that cache weights share one skip flag. Hide it from those that do not.
    state = {state}
    skip_flag = state.skip_fp8_weight_update_tensor
    if not cache_quantized_params:
        state.skip_fp8_weight_update_tensor = None
    try:
        yield
    finally:
        state.skip_fp8_weight_update_tensor = skip_flag

"""

CONTEXTS = {
    "torch.cuda.stream(torch.cuda.Stream())": 1,
    "_graph_context_wrapper(fwd_graph, pool=mempool)": 2,
    "_graph_context_wrapper(bwd_graph, pool=mempool)": 2,
}
"""What warmup, captures of forwards and captures of dgrads (which recompute activations) run in, and how often."""

SET_FLAG = "ctx.is_first_module and skip_fp8_weight_update is not None"

ALWAYS_SET_FLAG = "isinstance(skip_fp8_weight_update, bool)"


def examine(source: Source) -> Verdict:
    graph = source.module("transformer_engine.pytorch.graph")
    capture = graph.definition("_make_graphed_callables")
    if lacks_quantization(source):
        return not_applicable("TE before 2.9, with fp8.py for quantization.py, is not covered")
    state = skip_flag_state(source)
    graph.definition("is_graph_capturing")
    require_names(capture, "cache_quantized_params")
    changes = Changes("state", "is_first_microbatch", ".skip_fp8_weight_update_tensor")
    changes.before(capture, [start_of_warmup(capture)], OWN_FLAG.format(state=state))
    for context, count in CONTEXTS.items():
        changes.enter(capture, context, "own_skip_flag()", count)
    changes.replace(capture, SET_FLAG, ALWAYS_SET_FLAG)
    for module, name in MODULES.items():
        forward = source.module(f"transformer_engine.pytorch.module.{module}").definition(f"{name}.forward")
        require_names(forward, "is_first_microbatch")
        if forward.has(GRAD_MODE):
            changes.before(forward, [forward.one(GRAD_MODE)], QUANTIZE.format(state=state))
        else:
            changes.first(forward, QUANTIZE.format(state=state))
    return changes.verdict(
        "graphs without a skip flag of their own never quantize their weights again",
        "graphs quantize their weights whenever these are new",
    )


FIX = Fix(
    id="stale-fp8-weights",
    summary="graphs go on with the FP8 weights of their capture",
    symptom="outputs of FP8 graphs off by 1.0 after the first optimizer step, where weights are not cached",
    upstream=("https://github.com/NVIDIA/TransformerEngine/pull/3298",),
    affected=">=2.9",
    examine=examine,
    looks_like=("fp8 output", "fp8 gradient"),
)
