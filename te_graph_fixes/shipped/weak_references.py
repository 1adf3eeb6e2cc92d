"""Tensors that show memory without keeping it alive, of any dtype and with any strides."""

from __future__ import annotations

from typing import Any

import torch


def weak_reference(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the GPU as ``tensor`` is, at its place in memory, which it does not own."""
    memory = torch.as_tensor(_Bytes(tensor), device=tensor.device)
    view = memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    # These two are bits of a tensor: the memory holds the other sign.
    if tensor.is_conj():
        view = view.conj()
    return torch._neg_view(view) if tensor.is_neg() else view


class _Bytes:
    """All bytes from the first element of a tensor to its last, whatever its dtype: numpy lacks some of torch's."""

    def __init__(self, tensor: torch.Tensor) -> None:
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        elements = 1 + sum((size - 1) * stride for size, stride in sizes) if tensor.numel() else 0
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (elements * tensor.element_size(),),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }
