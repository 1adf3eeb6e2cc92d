"""Where the gradients go that a module's `backward_dw` (delayed wgrad) computes, eagerly and after a graph's replay.

A gradient belongs into the ``.grad`` of its parameter, added to what is there, as autograd does. A replayed graph runs
no Python, so what `backward_dw` assigns while it is captured (tensors in the graph's memory) is kept, and each replay
is followed by adding it. Gradients that are fused into ``main_grad`` are added by the graph itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter


def accumulate_grads(parameters: Sequence[Parameter], grad: Tensor | None) -> None:
    """Add ``grad``, the gradient of the parameters concatenated along their first dimension, to their ``.grad``.

    None or an empty tensor says that `backward_dw` has no such gradient: the dgrad has returned it to autograd. Frozen
    parameters get none.
    """
    if grad is None or grad.numel() == 0:
        return
    parts = [grad] if len(parameters) == 1 else grad.split([parameter.shape[0] for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        _add(parameter, part.to(parameter.dtype))


def _add(parameter: Parameter, grad: Tensor) -> None:
    if not parameter.requires_grad:
        return
    if parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad.add_(grad)


def visit_waiting(visited: dict[int, Any], index: int, called: Any) -> None:
    """Add to the modules ``visited`` by a callable those with a wgrad to compute, after its backward in a warmup.

    Forward hooks, by which TE learns what it visits, do not see modules whose ``forward`` is called directly.
    """
    modules = called.modules() if hasattr(called, "modules") else ()
    stores = {module: getattr(module, "wgrad_store", None) for module in modules}
    waiting = {module: None for module, store in stores.items() if store and store.context and store.context.qsize()}
    if waiting:
        visited.setdefault(index, {}).update(waiting)


def take_grads(module: Module) -> list[tuple[Parameter, Tensor]]:
    """Run the `backward_dw` of ``module`` for warmup or capture; return the gradients which it gives to parameters.

    Every ``.grad`` is left as it was, and the module's wgrad hooks are not run: they are for the gradients of a replay.
    """
    parameters = list(module.parameters())
    grads = [parameter.grad for parameter in parameters]
    hooks = getattr(module, "wgrad_accumulation_and_reduce_hooks", [])
    held = list(hooks)
    try:
        hooks.clear()
        for parameter in parameters:
            parameter.grad = None
        module.backward_dw()
        return [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    finally:
        hooks[:] = held
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad


def delayed_biases(modules: Iterable[Module]) -> set[int]:
    """The ids of the biases in ``modules`` whose own module delays its wgrads."""
    return {
        id(bias)
        for outer in modules
        for module in outer.modules()
        if hasattr(module, "need_backward_dw") and module.need_backward_dw()
        for name, bias in module.named_parameters(recurse=False)
        if "bias" in name
    }


def deliver_grads(grads: Iterable[tuple[Parameter, Tensor]]) -> None:
    """Add what a replay has left in a graph's memory to the ``.grad`` of each parameter, which never aliases it.

    A parameter that has been frozen gets none.
    """
    for parameter, grad in grads:
        _add(parameter, grad if parameter.grad is not None else grad.clone())
