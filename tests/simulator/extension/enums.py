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


_OF_FORWARDS = [f"GEMM{number}_{part}" for number in (1, 2, 3) for part in ("INPUT", "WEIGHT", "OUTPUT")]
_OF_BACKWARDS = [f"GRAD_{part}{number}" for number in (1, 2, 3) for part in ("OUTPUT", "INPUT")]
FP8FwdTensors = IntEnum("FP8FwdTensors", _OF_FORWARDS, start=0)
FP8BwdTensors = IntEnum("FP8BwdTensors", _OF_BACKWARDS, start=0)
"""The FP8 tensors of a forward and of a backward, numbered in the order of their quantizers."""


class Float8BlockScaleTensorFormat(IntEnum):
    """The layouts of block-scaled data in memory (TE 2.10 and 2.11)."""

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
    """Return the torch dtype for ``dtype``: a type of the extension or of TE's Python, or a torch dtype."""
    return dtype if isinstance(dtype, torch.dtype) else _TORCH[DType(int(dtype))]
