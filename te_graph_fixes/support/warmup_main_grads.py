"""Protect ``main_grad`` from the random gradients of a warmup."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def preserve_main_grads(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Restore each ``main_grad`` of the ``modules`` after a warmup, even if the warmup fails.

    No code reads the sums of a warmup, so all parameters share the memory of the largest ``main_grad``. If it is not
    zero, its content is saved in host memory. A ``main_grad`` that the user assigns during the warmup stays.
    """
    parameters: list[Any] = [parameter for module in modules for parameter in module.parameters()]
    main_grads = {
        parameter: parameter.main_grad for parameter in parameters if getattr(parameter, "main_grad", None) is not None
    }
    if not main_grads:
        yield
        return
    largest = max(main_grads.values(), key=lambda main_grad: main_grad.nbytes)
    shared = largest.as_strided((largest.numel(),), (1,)).view(torch.uint8)
    content = shared.cpu() if shared.any() else None
    stand_ins = {
        parameter: shared[: main_grad.nbytes].view(main_grad.dtype).view(main_grad.shape)
        for parameter, main_grad in main_grads.items()
    }
    for parameter, stand_in in stand_ins.items():
        parameter.main_grad = stand_in
    try:
        yield
    finally:
        for parameter, main_grad in main_grads.items():
            if getattr(parameter, "main_grad", None) is stand_ins[parameter]:
                parameter.main_grad = main_grad
        if content is None:
            shared.zero_()
        else:
            shared.copy_(content)
        torch.cuda.synchronize()  # after a failed warmup, no other code waits for its stream
