"""Functions of the extension that describe it and the machine, and small helpers for plain tensors."""

from __future__ import annotations

import torch

from ..graph import launch
from ..runtime import sm_arch

__all__ = [
    "device_supports_multicast",
    "fused_multi_row_padding",
    "fused_multi_row_unpadding",
    "get_cublasLt_version",
    "get_cudnn_version",
    "get_num_cublas_streams",
    "get_stream_priority_range",
    "swap_first_dims",
    "ubuf_built_with_mpi",
]


def get_cublasLt_version():
    """Return cuBLASLt's version: on Hopper 13.0's, too old for products of grouped tensors, else a later one."""
    return 130000 if sm_arch() < 100 else 130600


def get_cudnn_version():
    """Return the version of cuDNN 9.14."""
    return 91400


def get_num_cublas_streams():
    """Return how many streams a grouped GEMM is spread over."""
    return 4


def get_stream_priority_range(device_id=-1):
    """Return the lowest and the highest priority of a stream."""
    return (0, -5)


def device_supports_multicast(device_id=-1):
    """Return whether the GPU has NVLink multicast."""
    return False


def ubuf_built_with_mpi():
    """Return whether userbuffers were built with MPI."""
    return False


def swap_first_dims(tensor, *, out=None):
    """Return a contiguous copy with the first two dimensions exchanged."""
    if out is None:
        out = torch.empty([tensor.shape[1], tensor.shape[0], *tensor.shape[2:]], dtype=tensor.dtype)
    launch(_swap, [out], out, tensor)
    return out


def fused_multi_row_padding(tensor, out, rows, padded_rows):
    """Copy each group of rows to the head of its larger group in ``out`` and fill up with zeros."""
    launch(_copy_groups, [out], out, tensor, list(rows), list(padded_rows))


def fused_multi_row_unpadding(tensor, out, padded_rows, rows):
    """Copy the head of each group of rows to its smaller group in ``out``."""
    launch(_copy_groups, [out], out, tensor, list(padded_rows), list(rows))


def _copy_groups(out, tensor, rows, out_rows):
    for group, source in zip(out.split(out_rows), tensor.split(rows), strict=True):
        common = min(len(group), len(source))
        group[:common] = source[:common]
        group[common:] = 0


def _swap(out, tensor):
    out.copy_(tensor.transpose(0, 1))
