"""The parameter gradients that a replayed backward returns: copies, or dummies where the wgrad is in ``main_grad``.

TransformerEngine returns a dummy, which nobody reads, so that autograd runs the parameter's hooks. It has one for all
parameters of a shape and dtype (`get_dummy_wgrad`), outside of every graph's memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_shared_dummy(grad: Tensor | None, tensor: Tensor) -> bool:
    """Whether ``grad``, that of ``tensor``, is one of TransformerEngine's own dummies, and nobody reads it.

    Where ``zero_out_wgrad`` is set it is read.
    """
    from transformer_engine.pytorch.module.base import _dummy_wgrads

    if grad is None or getattr(tensor, "zero_out_wgrad", False):
        return False
    return any(grad.data_ptr() == dummy.data_ptr() for dummy in _dummy_wgrads.values())


class ReturnedGrads:
    """The gradients that a replayed backward returns for ``grads``, its static buffers: copies of those ``copied``.

    Vectors (biases, norm weights) are copied together, by one kernel into memory that they share: those whose sizes are
    multiples of `ALIGNMENT` bytes, so that each begins as aligned as in memory of its own.
    """

    ALIGNMENT = 256

    def __init__(self, grads: Sequence[Tensor | None], copied: Sequence[bool]) -> None:
        self._grads = grads
        self._alone: dict[int, Tensor] = {}
        vectors: dict[torch.dtype, dict[int, Tensor]] = {}
        for index, grad in enumerate(grads):
            if copied[index] and grad is not None:
                is_vector = grad.dim() == 1 and grad.nbytes % self.ALIGNMENT == 0
                group = vectors.setdefault(grad.dtype, {}) if is_vector else self._alone
                group[index] = grad
        self._together = [
            (tuple(alike), tuple(alike.values()), [grad.numel() for grad in alike.values()])
            for alike in vectors.values()
        ]

    def __call__(self) -> tuple[Tensor | None, ...]:
        returned = [None if grad is None else grad.detach() for grad in self._grads]
        for indexes, vectors, sizes in self._together:
            for index, copy in zip(indexes, torch.cat(vectors).split_with_sizes(sizes), strict=True):
                returned[index] = copy
        for index, grad in self._alone.items():
            returned[index] = grad.detach().clone()
        return tuple(returned)
