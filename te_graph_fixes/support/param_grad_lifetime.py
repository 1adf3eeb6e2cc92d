"""Copies of the parameter gradients from a replayed backward, and the gradients that need no copy."""

from collections.abc import Sequence

import torch
from torch import Tensor


def is_shared_dummy(grad: Tensor | None, tensor: Tensor) -> bool:
    """Return whether ``grad``, the gradient of ``tensor``, is a shared dummy that no code reads.

    TE returns a dummy instead of a fused wgrad so that autograd runs hooks. `get_dummy_wgrad` returns one dummy,
    outside of graph memory, for all weights of a shape and dtype. If ``zero_out_wgrad`` is set on ``tensor``, other
    code may read the dummy, so the result is False.
    """
    from transformer_engine.pytorch.module.base import _dummy_wgrads

    if grad is None or getattr(tensor, "zero_out_wgrad", False):
        return False
    return any(grad.data_ptr() == dummy.data_ptr() for dummy in _dummy_wgrads.values())


class ReturnedGrads:
    """A function that returns ``grads``, static buffers of a replayed backward. ``copied`` marks buffers to copy.

    For each dtype, one kernel copies all vectors (biases, norm weights) whose sizes are multiples of `ALIGNMENT` bytes
    into one block of memory. These sizes align each copy in this block as if it were allocated separately.
    """

    ALIGNMENT = 256

    def __init__(self, grads: Sequence[Tensor | None], copied: Sequence[bool]) -> None:
        self._grads = grads
        self._single: dict[int, Tensor] = {}
        vectors: dict[torch.dtype, dict[int, Tensor]] = {}
        for index, grad in enumerate(grads):
            if copied[index] and grad is not None:
                is_vector = grad.dim() == 1 and grad.nbytes % self.ALIGNMENT == 0
                group = vectors.setdefault(grad.dtype, {}) if is_vector else self._single
                group[index] = grad
        self._groups = [
            (tuple(group), tuple(group.values()), [grad.numel() for grad in group.values()])
            for group in vectors.values()
        ]

    def __call__(self) -> tuple[Tensor | None, ...]:
        returned = [None if grad is None else grad.detach() for grad in self._grads]
        for indexes, vectors, sizes in self._groups:
            for index, copy in zip(indexes, torch.cat(vectors).split_with_sizes(sizes), strict=True):
                returned[index] = copy
        for index, grad in self._single.items():
            returned[index] = grad.detach().clone()
        return tuple(returned)
