"""The enumerations of the extension that TE's linear modules use, with the values of TE's C headers."""

from __future__ import annotations

from enum import IntEnum

import torch

__all__ = ["DType", "FP8BwdTensors", "FP8FwdTensors", "Float8BlockScaleTensorFormat"]


class DType(IntEnum):
    """The values of ``transformer_engine::DType``."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


class FP8FwdTensors(IntEnum):
    """The tensors of a forward that have scales."""

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class FP8BwdTensors(IntEnum):
    """The tensors of a backward that have scales."""

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5


class Float8BlockScaleTensorFormat(IntEnum):
    """The layouts of block-scaled data in memory (TE 2.10)."""

    GEMM_READY = 0
    COMPACT = 1


_TORCH = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}


def torch_dtype(dtype):
    """Return the torch dtype for ``dtype``: a type of the extension, a type of TE's Python, or a torch dtype."""
    return dtype if isinstance(dtype, torch.dtype) else _TORCH[DType(int(dtype))]
