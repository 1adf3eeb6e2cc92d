"""Bug: every graph swizzles the scales of cached NVFP4 weights once more.

Upstream: none yet, TE 2.18 to main (upstream/nvfp4-weight-preswizzle.md); the remaining part of
https://github.com/NVIDIA/TransformerEngine/issues/3220. Seen in the source and on a simulator, not on a GPU.

From capability 10.0 on, `_enable_weight_preswizzle` requests swizzled scales: scales in the order that a GEMM reads.
TE's kernels write this order on capability 10.0 to 11.0. On other GPUs ``tex.quantize`` swizzles afterwards, even if
the skip flag tells the graph to reuse the weight. The swizzled scales are new memory, owned by the cached weight.
So graph n swizzles the result of graph n-1, and a single graph writes to memory without an owner. With the fix, a
module has plain scales from its first capture on, as before TE 2.18, and a GEMM swizzles a copy. A module that is never
captured has swizzled scales, as without the fix.
"""

from ..fix import Fix

PATCH = """
@@ module/base.py TransformerEngineBaseModule._enable_weight_preswizzle
 arch_supported = get_device_compute_capability() >= (10, 0)
+if get_device_compute_capability() > (11, 0):
+    from .._te_nvfp4_weight_preswizzle import has_plain_scales
+
+    arch_supported = not has_plain_scales(self)
 if quantizer.with_rht:
     return arch_supported and ANY and ANY
 return arch_supported and quantizer.with_2d_quantization and ANY and ANY and ANY and ANY
"""

EARLIER = """
@@ module/linear.py Linear (0 times)
 weight_quantizer.optimize_for_gemm = ANY
"""

FIX = Fix(
    symptom="NVFP4 with cached weights on RTX Blackwell: outputs and dgrads have a relative error of 0.2 to 0.6",
    group="FP8 state",
    affects="NVFP4BlockScaling (Megatron --fp4-recipe nvfp4) with cached weights on GPUs of capability 12.x",
    since="2.18",
    patch=PATCH,
    absent=[(EARLIER, "TE before 2.18 requests no swizzled scales for weights")],
    check_hints=("fp8 output", "fp8 gradient"),
)
