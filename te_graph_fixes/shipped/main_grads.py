"""Backwards of warmup: what they add to ``main_grad`` is no gradient, and must not stay there.

Nobody reads the sums, so all parameters can add to the same memory: that of the largest ``main_grad``. Its content is
all that has to be kept, in host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def main_grads_kept(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Run a warmup; each ``main_grad`` of the ``modules`` is as before afterwards, also where the warmup fails.

    Takes no memory on the GPU, and on the host the size of the largest ``main_grad``, if that is not zero.
    """
    parameters = [parameter for module in modules for parameter in module.parameters()]
    main_grads: list[tuple[Any, torch.Tensor]] = [
        (parameter, parameter.main_grad)
        for parameter in parameters
        if getattr(parameter, "main_grad", None) is not None
    ]
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
