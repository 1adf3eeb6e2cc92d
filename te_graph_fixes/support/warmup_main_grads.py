"""Protect ``main_grad`` from the random gradients of a warmup."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def preserve_main_grads(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Restore each ``main_grad`` of the ``modules`` after a warmup, even if the warmup fails.

    No code reads the sums of a warmup, so in the warmup all parameters share the memory of the largest ``main_grad`` of
    their dtype and device. If the largest is not contiguous, or if a ``main_grad`` is a property, each parameter keeps
    its own memory. Memory that is not zero is saved in host memory. A ``main_grad`` assigned during the warmup stays.
    """
    parameters: list[Any] = [parameter for module in modules for parameter in module.parameters()]
    main_grads: dict[Any, torch.Tensor] = {
        parameter: parameter.main_grad for parameter in parameters if getattr(parameter, "main_grad", None) is not None
    }
    if not main_grads:
        yield
        return
    groups: dict[Any, list[Any]] = {}
    for parameter, main_grad in main_grads.items():
        groups.setdefault((main_grad.device, main_grad.dtype), []).append(parameter)
    stand_ins: dict[Any, torch.Tensor] = {}
    written: list[torch.Tensor] = []
    for group in groups.values():
        largest = max((main_grads[parameter] for parameter in group), key=torch.Tensor.numel)
        if largest.is_contiguous() and all("main_grad" in vars(parameter) for parameter in group):
            written.append(_memory(largest))
            for parameter in group:
                main_grad = main_grads[parameter]
                stand_ins[parameter] = written[-1][: main_grad.numel()].view(main_grad.shape)
        else:
            written += [_memory(main_grads[parameter]) for parameter in group]
    contents = [memory.cpu() if memory.any() else None for memory in written]
    for parameter, stand_in in stand_ins.items():
        parameter.main_grad = stand_in
    try:
        yield
    finally:
        for parameter, stand_in in stand_ins.items():
            if getattr(parameter, "main_grad", None) is stand_in:
                parameter.main_grad = main_grads[parameter]
        for memory, content in zip(written, contents, strict=True):
            if content is None:
                memory.zero_()
            else:
                memory.copy_(content)
        torch.cuda.synchronize()  # after a failed warmup, no other code waits for its stream


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory from the first to the last element of ``tensor``, in one dimension."""
    gaps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((gaps + 1 if tensor.numel() else 0,), (1,))
