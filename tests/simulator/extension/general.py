"""Functions of the extension that return version numbers or the number of streams, or copy groups of rows."""

from __future__ import annotations

from ..graph import launch
from ..runtime import sm_arch

__all__ = [
    "fused_multi_row_padding",
    "fused_multi_row_unpadding",
    "get_cublasLt_version",
    "get_cudnn_version",
    "get_num_cublas_streams",
]


def get_cublasLt_version():
    """Return a version of cuBLASLt: 13.6 or, on Hopper, 13.0, which is too old for products of grouped tensors."""
    return 130000 if sm_arch() < 100 else 130600


def get_cudnn_version():
    """Return 91400, the version number of cuDNN 9.14."""
    return 91400


def get_num_cublas_streams():
    """Return the number of streams of a grouped GEMM."""
    return 4


def fused_multi_row_padding(tensor, out, rows, padded_rows):
    """Copy each group of rows to the start of a larger group in ``out``, whose other rows are filled with zeros."""
    launch(_copy_groups, [out], out, tensor, list(rows), list(padded_rows))


def fused_multi_row_unpadding(tensor, out, padded_rows, rows):
    """Copy the first rows of each group to a smaller group in ``out``."""
    launch(_copy_groups, [out], out, tensor, list(padded_rows), list(rows))


def _copy_groups(out, tensor, rows, out_rows):
    for group, source in zip(out.split(out_rows), tensor.split(rows), strict=True):
        common = min(len(group), len(source))
        group[:common] = source[:common]
        group[common:] = 0
