"""Undo the effects of a warmup iteration that the caller of a capture did not request."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def preserve_buffers(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Restore the buffers of the ``modules``, and the random states of the CPU, after a warmup.

    A buffer that the warmup adds stays. TransformerEngine itself restores the random states of the GPU.
    """
    registries = [module._buffers for outer in modules for module in outer.modules()]
    buffers = [(registry, name, value) for registry in registries for name, value in registry.items()]
    if not registries:
        yield
        return
    values = [None if buffer is None else buffer.clone() for _, _, buffer in buffers]
    random_states = random.getstate(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(random_states[0])
        torch.set_rng_state(random_states[1])
        for (registry, name, buffer), value in zip(buffers, values, strict=True):
            registry[name] = buffer
            if buffer is not None:
                buffer.copy_(value)
