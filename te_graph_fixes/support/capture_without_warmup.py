"""Undo the effects of a warmup iteration that the caller of a capture did not request."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def preserve_buffers(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """After a warmup, restore the random states of the CPU and the tensors of the ``modules``, except parameters.

    Modules and tensors in lists, tuples and dicts of a module are restored too. A buffer that the warmup adds stays.
    Without ``modules``, nothing is restored. TransformerEngine itself restores the random states of the GPU.
    """
    modules = [*modules]
    if not modules:
        yield
        return
    held = [*_held(modules, set())]
    registries = [module._buffers for module in held if isinstance(module, torch.nn.Module)]
    buffers = [(registry, name, value) for registry in registries for name, value in registry.items()]
    tensors = {value for value in held if isinstance(value, torch.Tensor)}
    tensors |= {buffer for _, _, buffer in buffers if buffer is not None}
    values = [(tensor, tensor.clone()) for tensor in tensors]
    random_states = random.getstate(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(random_states[0])
        torch.set_rng_state(random_states[1])
        for registry, name, buffer in buffers:
            registry[name] = buffer
        for tensor, value in values:
            tensor.data.copy_(value)  # without a new version, which the record takes for a write of the forward


def _held(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the modules and tensors (no parameters) at any depth of ``value``. ``seen`` are ids of visited values."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if type(value) is torch.Tensor or isinstance(value, torch.nn.Module):
        yield value
    if isinstance(value, torch.nn.Module):
        value = vars(value)
    if isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _held(item, seen)
