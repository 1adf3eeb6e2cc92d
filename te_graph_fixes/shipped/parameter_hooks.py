"""Backwards of warmup and capture: the hooks of parameters belong to the gradients of training, and must not run."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def hooks_put_aside(owner: Any) -> Iterator[None]:
    """Within the block no hook of the parameters of ``owner`` runs, which has some if it is a module.

    Neither hooks of a tensor's gradient, nor those for after its accumulation, nor those that are registered with the
    node that accumulates, as data-parallel wrappers do. Nothing is unregistered: their handles stay valid.
    """
    # In inference mode no backward is recorded.
    is_module = isinstance(owner, torch.nn.Module) and not torch.is_inference_mode_enabled()
    parameters = owner.parameters() if is_module else ()
    registries = [hooks for parameter in parameters if parameter.requires_grad for hooks in _hooks(parameter)]
    held = [dict(hooks) for hooks in registries]
    for hooks in registries:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(registries, held, strict=True):
            added = dict(hooks)
            hooks.clear()
            hooks.update({**before, **added})


def _hooks(parameter: Any) -> Iterator[MutableMapping[int, Any]]:
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(parameter, name, None)
        if hooks:
            yield hooks
    with torch.enable_grad():
        view = parameter.expand_as(parameter)  # where its class does this in Python, the node lives as long as the view
    node = view.grad_fn.next_functions[0][0]
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            yield hooks
