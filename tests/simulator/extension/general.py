"""What the extension says about itself and the machine, and small helpers on plain tensors."""

from __future__ import annotations

import torch

from ..graph import launch

__all__ = [
    "device_supports_multicast",
    "get_cublasLt_version",
    "get_cudnn_version",
    "get_num_cublas_streams",
    "get_stream_priority_range",
    "swap_first_dims",
    "ubuf_built_with_mpi",
]


def get_cublasLt_version() -> int:
    """cuBLASLt of CUDA 13.0: too old for the grouped GEMMs that TE 2.17 and later use where they can."""
    return 130000


def get_cudnn_version() -> int:
    """cuDNN 9.14."""
    return 91400


def get_num_cublas_streams() -> int:
    """How many streams a grouped GEMM is spread over."""
    return 4


def get_stream_priority_range(device_id: int = -1) -> tuple[int, int]:
    """The lowest and the highest priority of a stream."""
    return (0, -5)


def device_supports_multicast(device_id: int = -1) -> bool:
    """Whether NVLink multicast is there."""
    return False


def ubuf_built_with_mpi() -> bool:
    """Whether userbuffers were built with MPI."""
    return False


def swap_first_dims(tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """A contiguous copy with the first two dimensions exchanged."""
    if out is None:
        out = torch.empty([tensor.shape[1], tensor.shape[0], *tensor.shape[2:]], dtype=tensor.dtype)
    launch(_swap, [out], out, tensor)
    return out


def _swap(out: torch.Tensor, tensor: torch.Tensor) -> None:
    out.copy_(tensor.transpose(0, 1))
