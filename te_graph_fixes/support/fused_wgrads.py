"""Dummy gradients, returned by TransformerEngine instead of fused wgrads so that autograd runs hooks."""

from __future__ import annotations

from torch import Tensor


def is_shared_dummy(grad: Tensor | None, tensor: Tensor) -> bool:
    """Return whether ``grad``, the gradient of ``tensor``, is a shared dummy that no code reads.

    `get_dummy_wgrad` returns one dummy, outside of graph memory, for all weights of a shape and dtype. If
    ``zero_out_wgrad`` is set on ``tensor``, other code may read the dummy, so the result is False.
    """
    from transformer_engine.pytorch.module.base import _dummy_wgrads

    if grad is None or getattr(tensor, "zero_out_wgrad", False):
        return False
    return any(grad.data_ptr() == dummy.data_ptr() for dummy in _dummy_wgrads.values())
