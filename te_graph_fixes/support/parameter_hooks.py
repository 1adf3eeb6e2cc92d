"""Disable the hooks of parameters in the backwards of warmup and capture, whose gradients are meaningless."""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def hooks_disabled(function: Any) -> Iterator[None]:
    """Disable all hooks on the parameters of ``function``, if it is a module, inside the ``with`` block.

    These are hooks on a gradient, hooks after its accumulation, and hooks on the node that accumulates it (as in
    data-parallel wrappers). The handles of the hooks stay valid.
    """
    # In inference mode, autograd records no backward, so no hook can run.
    is_module = isinstance(function, torch.nn.Module) and not torch.is_inference_mode_enabled()
    parameters = function.parameters() if is_module else ()
    registries = [hooks for parameter in parameters if parameter.requires_grad for hooks in _hooks(parameter)]
    hooks_before = [dict(hooks) for hooks in registries]
    for hooks in registries:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(registries, hooks_before, strict=True):
            added = dict(hooks)
            hooks.clear()
            hooks.update({**before, **added})


def _hooks(parameter: Any) -> Iterator[MutableMapping[int, Any]]:
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(parameter, name, None)
        if hooks:
            yield hooks
    with torch.enable_grad():
        view = parameter.expand_as(parameter)  # keeps the node alive if the parameter's class creates it in Python
    node = view.grad_fn.next_functions[0][0]
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            yield hooks
