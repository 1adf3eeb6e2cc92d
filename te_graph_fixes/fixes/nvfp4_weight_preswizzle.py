"""``nvfp4-weight-preswizzle``: cached NVFP4 weights get their scales swizzled once more in every graph.

Upstream: open, TE 2.18 to main (docs/upstream/nvfp4-weight-preswizzle.md); the rest of
https://github.com/NVIDIA/TransformerEngine/issues/3220. Known from the sources and a simulator, not from a GPU.

Symptom: NVFP4 with cached weights on GPUs of capability 12.x. With a graph for each microbatch, wrong outputs and
dgrads from the second one on; with one graph, its kernel writes to memory that nobody owns.

`_enable_weight_preswizzle` asks for scales in the order of a GEMM from capability 10.0 on. TE's kernels write them so
from 10.0 to 11.0. Elsewhere ``tex.quantize`` swizzles afterwards, even where the graph's flag says that the weight is
to stay as it is, into new memory which it gives to the cached weight: graph n swizzles what graph n-1 has swizzled.
There, weights now keep plain scales, as before TE 2.18; a GEMM swizzles a copy of them.

``not-needed``: the range ends at 11.0, or quantizers of weights are never asked for such scales. ``not-applicable``:
``Quantizer`` has no ``optimize_for_gemm``.
"""

from __future__ import annotations

import ast
import re

from ..fix import Fix, Verdict, applicable, not_applicable, not_needed
from ..shapes import MODULES
from ..source import Source, unrecognized

ASKS = """
arch_supported = ANY_SUPPORTED
if quantizer.with_rht:
    return arch_supported and ANY and ANY
return arch_supported and quantizer.with_2d_quantization and ANY and ANY and ANY and ANY
"""

FROM_10_0_ON = "get_device_compute_capability() >= (10, 0)"
FROM_10_0_TO_11_0 = "(10, 0) <= get_device_compute_capability() <= (11, 0)"


def examine(source: Source) -> Verdict:
    base = source.module("transformer_engine.pytorch.module.base")
    enable = base.find("TransformerEngineBaseModule._enable_weight_preswizzle")
    if enable is not None:
        supported = enable.exactly(1, ASKS)[0]["ANY_SUPPORTED"]
        found = ast.unparse(supported)
        if found == FROM_10_0_TO_11_0:
            return not_needed("NVFP4 weights get swizzled scales where the kernels write them so")
        if found != FROM_10_0_ON:
            raise unrecognized(f"`arch_supported = {FROM_10_0_ON}`", enable, f"`{found}`")
        return applicable(
            "NVFP4 weights are to have swizzled scales where the kernels do not write them so",
            [enable.replace(supported, FROM_10_0_TO_11_0)],
        )
    home = source.find("transformer_engine.pytorch.quantized_tensor") or source.module(
        "transformer_engine.pytorch.tensor.quantized_tensor"  # up to TE 2.8
    )
    if not home.definition("Quantizer").has("optimize_for_gemm: bool"):
        return not_applicable("quantizers cannot be asked for swizzled scales (Quantizer.optimize_for_gemm)")
    if "optimize_for_gemm" in base.text:
        raise unrecognized("a base class that leaves optimize_for_gemm to layers", base.path, "it in its text")
    for file, name in MODULES.items():
        module = source.module(f"transformer_engine.pytorch.module.{file}").definition(name)
        lines = "".join(line for line in module.module.text.splitlines(True) if "optimize_for_gemm" in line)
        asked = re.findall(r"([\w.\[\]]*)\.optimize_for_gemm = ", lines)
        known = [who for who in asked if "input_quantizer" in who or "grad_output_quantizer" in who]
        if not asked or len(known) != module.module.text.count("optimize_for_gemm"):
            wanted = "`optimize_for_gemm` set on quantizers of inputs and output grads alone"
            raise unrecognized(wanted, module, ", ".join(asked) or "none")
    return not_needed("only inputs and output grads get swizzled scales, not weights")


FIX = Fix(
    id="nvfp4-weight-preswizzle",
    summary="every graph swizzles the scales of cached NVFP4 weights again, where the kernels do not (capability 12.x)",
    symptom="outputs and dgrads wrong from the second microbatch on, a graph each; one graph: writes to freed memory",
    upstream=("https://github.com/NVIDIA/TransformerEngine/issues/3220",),
    affected=">=2.18",
    examine=examine,
    looks_like=("fp8 output", "fp8 gradient"),
)
