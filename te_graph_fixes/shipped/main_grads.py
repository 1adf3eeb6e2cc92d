"""Backwards of warmup: what they add to ``main_grad`` is no gradient, and must not stay there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def main_grads_kept(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Run a warmup; each ``main_grad`` of the ``modules`` is as before afterwards, also where the warmup fails.

    Nobody reads the sums, so all parameters add to the same memory: that of the largest ``main_grad``. Its content is
    kept in host memory, where it is not zero.
    """
    parameters: list[Any] = [parameter for module in modules for parameter in module.parameters()]
    fused = [parameter for parameter in parameters if getattr(parameter, "main_grad", None) is not None]
    main_grads = [(parameter, parameter.main_grad) for parameter in fused]
    if not main_grads:
        yield
        return
    largest = max((main_grad for _, main_grad in main_grads), key=lambda main_grad: main_grad.nbytes)
    shared = largest.as_strided((largest.numel(),), (1,)).view(torch.uint8)
    content = shared.cpu() if shared.any() else None
    for parameter, main_grad in main_grads:
        parameter.main_grad = shared[: main_grad.nbytes].view(main_grad.dtype).view(main_grad.shape)
    try:
        yield
    finally:
        for parameter, main_grad in main_grads:
            parameter.main_grad = main_grad
        if content is None:
            shared.zero_()
        else:
            shared.copy_(content)
        torch.cuda.synchronize()  # after a warmup that fails nobody waits for its stream
