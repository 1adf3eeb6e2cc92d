"""Undo the effects of a warmup iteration that the caller of a capture did not request."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from ._te_replay_contract_members import tensors_in


@contextmanager
def preserve_buffers(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """After a warmup, restore the random states of the CPU and the tensors of the ``modules``, except parameters.

    Tensors and modules in containers of a module are restored too. If a forward replaces a buffer, it is restored only
    in a submodule. A buffer that the warmup adds stays. Without ``modules``, nothing is restored. TransformerEngine
    itself restores the random states of the GPU.
    """
    modules = [*modules]
    if not modules:
        yield
        return
    registries = {inner: inner._buffers for module in modules for inner in module.modules()}.values()
    buffers = [(registry, dict(registry)) for registry in registries]
    plain = {tensor for tensor in tensors_in(modules) if type(tensor) is torch.Tensor}
    registered = {buffer for registry in registries for buffer in registry.values() if buffer is not None}
    values = [(tensor, tensor.clone()) for tensor in plain | registered]
    random_states = random.getstate(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(random_states[0])
        torch.set_rng_state(random_states[1])
        for registry, before in buffers:
            registry.update(before)
        for tensor, value in values:
            tensor.data.copy_(value)  # without a new version, which the record takes for a write of the forward
