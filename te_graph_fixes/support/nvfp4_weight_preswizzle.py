"""Plain scales for the NVFP4 weights of modules that TransformerEngine (TE) captures, on GPUs of capability 12.x."""

from typing import Any

import torch
from torch import Tensor
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

ATTRIBUTE = "_te_has_plain_scales"


def has_plain_scales(module: Any) -> bool:
    """Return whether the weights of ``module`` have plain scales because a capture uses or has used the module.

    If eager calls have cached swizzled scales, the first call in a warmup converts them to plain scales. In the capture
    itself, this conversion would become part of the graph.
    """
    if ATTRIBUTE in module.__dict__:
        return True
    if not FP8GlobalStateManager.fp8_graph_capturing() or torch.cuda.is_current_stream_capturing():
        return False
    module.__dict__[ATTRIBUTE] = True
    for weight in module._fp8_workspaces.values():
        if getattr(weight, "_with_gemm_swizzled_scales", False):
            for scales in (weight._rowwise_scale_inv, weight._columnwise_scale_inv):
                if scales is not None:
                    scales.copy_(_plain(scales))
            weight._with_gemm_swizzled_scales = False
            weight._quantizer.optimize_for_gemm = False
    return True


def _plain(scales: Tensor) -> Tensor:
    """Return swizzled scales in row-major order. A GEMM reads tiles of 128 x 4 scales, with rows in groups of 32."""
    rows, columns = scales.shape
    return scales.view(rows // 128, columns // 4, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(rows, columns)
