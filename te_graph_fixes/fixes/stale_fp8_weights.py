"""``stale-fp8-weights``: graphs go on with the FP8 weights of their capture.

Upstream: open, TE 2.9 to main; https://github.com/NVIDIA/TransformerEngine/pull/3298 is about the second case.

Symptom: after an optimizer step the outputs of graphed FP8 modules are off by about 1.0, because weights are not
quantized again. It happens

1. to modules that carry ``is_first_microbatch``, as Megatron-Core's do, where the capture does not cache weights
   (``cache_quantized_params=False``; Megatron-Core does not where attention is not captured). Warmup leaves False
   behind, and without the graph's skip flag False means that weights are never quantized. It now means what it means
   for wgrads: quantize, and accumulate. Before TE 2.14 it needs `warmup-reset` to show;
2. to a capture that does not cache weights, after one that does: it reads the skip flag of the other;
3. where another FP8 module runs before the graph in the same autocast: the graph does not set the skip flag, so it
   still has the value that a later microbatch has given it elsewhere. The first microbatch now always sets it.
"""

from __future__ import annotations

import ast
from typing import cast

from ..fix import Fix, Verdict, applicable, not_applicable, not_needed
from ..source import Definition, Edit, Source, UnrecognizedError

MODULES = {
    "linear": "Linear",
    "layernorm_linear": "LayerNormLinear",
    "layernorm_mlp": "LayerNormMLP",
    "grouped_linear": "GroupedLinear",
}

QUANTIZE = """
# Captured without a skip flag, "not the first microbatch" would mean that weights are never quantized.
if (
    is_first_microbatch is False
    and {state}.{capturing}
    and {state}.skip_fp8_weight_update_tensor is None
):
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

WRAPPER = """
def call_func(self, *args, **kwargs):
    with ANY_AUTOCAST:
        outputs = old_call_funcs[block_cls](self, *args, **kwargs)
    return outputs
"""

SET_FLAG = "ctx.is_first_module and skip_fp8_weight_update is not None"

ALWAYS_SET_FLAG = "skip_fp8_weight_update is not None and (ctx.is_first_module or not skip_fp8_weight_update)"


def examine(source: Source) -> Verdict:
    if source.find("transformer_engine.pytorch.quantization") is None:
        return not_applicable("TE before 2.9, with fp8.py for quantization.py, is not covered")
    graph = source.module("transformer_engine.pytorch.graph")
    public, capture = graph.definition("make_graphed_callables"), graph.definition("_make_graphed_callables")
    forwards = [
        source.definition(f"transformer_engine.pytorch.module.{module}", f"{name}.forward")
        for module, name in MODULES.items()
    ]
    corrected = [
        "def own_skip_flag" in public.text(public.node),
        capture.has(ALWAYS_SET_FLAG),
        *(forward.has("is_first_microbatch = None") for forward in forwards),
    ]
    if all(corrected):
        return not_needed("graphs quantize their weights whenever these are new")
    if any(corrected):
        raise UnrecognizedError(
            f"looked for modules that all can keep stale weights in {source.location}, found a mixture"
        )
    state, capturing = _state(source)
    public.require_parameters("cache_quantized_params")
    wrapper = cast(ast.FunctionDef, public.one(WRAPPER))
    autocast = cast(ast.With, wrapper.body[0])
    start = public.module.offset(autocast.items[0].context_expr.lineno, autocast.items[0].context_expr.col_offset)
    wrap = next(node for node in ast.walk(public.node) if isinstance(node, ast.FunctionDef) and wrapper in node.body)
    return applicable(
        "graphs without a skip flag of their own never quantize their weights again",
        [
            public.insert_before(wrap, OWN_FLAG.format(state=state)),
            Edit(graph.name, start, start, "own_skip_flag(), "),
            capture.replace(capture.one(SET_FLAG), ALWAYS_SET_FLAG),
            *(_quantize(forward, QUANTIZE.format(state=state, capturing=capturing)) for forward in forwards),
        ],
    )


def _state(source: Source) -> tuple[str, str]:
    """What holds the skip flag while the program runs, and the name in it that says whether a capture is under way."""
    quantization = source.module("transformer_engine.pytorch.quantization")
    manager = quantization.definition("FP8GlobalStateManager")
    if manager.has("quantization_state = FP8GlobalState()"):
        state = quantization.definition("FP8GlobalState")
        state.one("skip_fp8_weight_update_tensor: ANY_TYPE = None")
        state.one("fp8_graph_capturing: bool = False")
        return "FP8GlobalStateManager.quantization_state", "fp8_graph_capturing"
    for name, value in (("skip_fp8_weight_update_tensor", "None"), ("FP8_GRAPH_CAPTURING", "False")):
        if not manager.has(f"{name} = {value}"):
            raise UnrecognizedError(
                f"looked for {name} = {value} in {manager.qualname} ({quantization.path}), found none"
            )
    return "FP8GlobalStateManager", "FP8_GRAPH_CAPTURING"


def _quantize(forward: Definition, text: str) -> Edit:
    forward.require_parameters("is_first_microbatch")
    if forward.has("ANY_FLAG = torch.is_grad_enabled()"):
        return forward.insert_before(forward.one("ANY_FLAG = torch.is_grad_enabled()"), text)
    return forward.insert_at_start(text)


FIX = Fix(
    id="stale-fp8-weights",
    summary="graphs go on with the FP8 weights of their capture",
    symptom="outputs of FP8 graphs off by 1.0 after the first optimizer step, where weights are not cached",
    upstream=("https://github.com/NVIDIA/TransformerEngine/pull/3298",),
    affected=">=2.9",
    examine=examine,
    looks_like=("fp8 output", "fp8 dgrad"),
)
