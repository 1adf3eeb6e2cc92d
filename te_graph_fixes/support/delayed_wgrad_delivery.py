"""Assign the gradients of a captured `backward_dw` (delayed wgrad) to their parameters after each replay."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from transformer_engine.pytorch.utils import make_weak_ref

DelayedGrad = tuple[Parameter, Tensor, bool]
"""A parameter, its gradient in the memory of a wgrad graph, and whether the parameter is a bias."""


def visit_waiting(visited: dict[int, Any], index: int, called: Any) -> None:
    """Add to ``visited[index]`` the modules of ``called`` that have a pending wgrad after the backward of a warmup.

    TransformerEngine records visits by forward hooks, but a direct call of ``forward`` runs no hooks.
    """
    modules = called.modules() if hasattr(called, "modules") else ()
    stores = {module: getattr(module, "wgrad_store", None) for module in modules}
    waiting = {module: None for module, store in stores.items() if store and store.context and store.context.qsize()}
    if waiting:
        visited.setdefault(index, {}).update(waiting)


def record_backward_dw(module: Module, returned: Iterable[Tensor]) -> list[DelayedGrad]:
    """Run the `backward_dw` of ``module`` in a warmup or capture. Return the gradients that it assigned, or [].

    ``returned`` are the parameters whose gradients the dgrad returns. During `backward_dw`, their ``.grad`` is not
    None, as in eager training. Afterwards every ``.grad`` is restored. The module's wgrad hooks do not run, because
    replays run them. In a warmup, raise RuntimeError if wgrads remain.
    """
    parameters = [*module.parameters()]
    grads = [parameter.grad for parameter in parameters]
    hooks = getattr(module, "wgrad_accumulation_and_reduce_hooks", [])
    disabled_hooks = list(hooks)
    with_grad = {id(parameter) for parameter in returned}
    stand_ins = [_stand_in(parameter) if id(parameter) in with_grad else None for parameter in parameters]
    try:
        hooks.clear()
        for parameter, stand_in in zip(parameters, stand_ins, strict=True):
            parameter.grad = stand_in
        module.backward_dw()
        pending = getattr(getattr(module, "wgrad_store", None), "context", None)
        if pending and pending.qsize() and not torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(module).__name__} has wgrads that remain after its backward_dw(), because the module ran "
                "more than once in a captured forward. A graph would lose these wgrads. Set delay_wgrad_compute=False, "
                "or run the module once."
            )
        return [
            (parameter, parameter.grad, "bias" in name.rpartition(".")[2])
            for (name, parameter), stand_in in zip(module.named_parameters(), stand_ins, strict=True)
            if parameter.grad is not stand_in
        ]
    finally:
        hooks[:] = disabled_hooks
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad


def delivery(grads: Iterable[DelayedGrad]) -> Callable[[], None]:
    """Return a function that assigns copies of the gradients of a captured wgrad graph after each replay.

    It assigns them as TransformerEngine's eager `backward_dw` does. The graph itself adds gradients to ``main_grad``.
    The function does not own the memory of the gradients, so later captures may reuse this memory. This is safe,
    because the function reads the gradients right after the replay. The other modules in the graph must not reuse this
    memory, because they would write to it earlier.
    """
    delayed = [(parameter, make_weak_ref(grad), is_bias) for parameter, grad, is_bias in grads]

    def assign() -> None:
        for parameter, grad, is_bias in delayed:
            if not parameter.requires_grad:
                continue  # The parameter was frozen after the capture.
            if not is_bias or parameter.grad is None:
                parameter.grad = None  # frees the old gradient before the copy is allocated
                parameter.grad = grad.clone()
            elif parameter.dim() > 1:  # One tensor for the biases of all experts: TE adds to its .grad, up to TE 2.18.
                parameter.grad.add_(grad)

    return assign


def _stand_in(parameter: Parameter) -> Tensor:
    """Return a placeholder for the ``.grad`` of a parameter: one element, expanded to the parameter's shape."""
    return torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


def delayed_biases(modules: Sequence[Module]) -> set[int]:
    """Return the ids of the biases owned directly by ``modules`` or submodules that delay wgrads, or an empty set."""
    return {
        id(bias)
        for outer in modules
        for module in outer.modules()
        if hasattr(module, "need_backward_dw") and module.need_backward_dw()
        for name, bias in module.named_parameters(recurse=False)
        if "bias" in name
    }
