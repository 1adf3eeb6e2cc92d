"""Weak references to tensors of any dtype and strides. A weak reference views memory without owning it."""

import torch


def num_bytes(tensor: torch.Tensor) -> int:
    """Return the number of bytes from the first element of a tensor to its last."""
    if not tensor.numel():
        return 0
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in sizes)
    return int(elements * tensor.element_size())


def view_like(memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of ``memory``, the bytes of ``tensor``, with the dtype, shape and strides of ``tensor``."""
    view = memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    # Conjugation and negation are only flags of a tensor. Its memory has the values without them.
    if tensor.is_conj():
        view = view.conj()
    return torch._neg_view(view) if tensor.is_neg() else view
