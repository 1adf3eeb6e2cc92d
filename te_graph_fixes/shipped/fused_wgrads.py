"""TransformerEngine's dummies, returned by a backward in place of fused wgrads so that autograd runs hooks."""

from __future__ import annotations

from torch import Tensor


def is_shared_dummy(grad: Tensor | None, tensor: Tensor) -> bool:
    """Return whether ``grad`` of ``tensor`` is an unread dummy, shared by all weights of the same shape.

    The dummies of `get_dummy_wgrad` are outside the memory of every graph. Some code reads them if ``zero_out_wgrad``
    is set.
    """
    from transformer_engine.pytorch.module.base import _dummy_wgrads

    if grad is None or getattr(tensor, "zero_out_wgrad", False):
        return False
    return any(grad.data_ptr() == dummy.data_ptr() for dummy in _dummy_wgrads.values())
