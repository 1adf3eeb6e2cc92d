"""Callables other than a single module with one output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformer_engine.pytorch as te

from .training import HIDDEN, TOKENS, error

OPTIONS: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda"}
MODULES = 8


class WithNone(te.Linear):  # type: ignore[misc,unused-ignore]
    """A projection that has a second output, None."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


def none_output() -> dict[str, Any]:
    """The errors of two microbatches of a callable with an output that is None, captured with an order and without."""
    errors = []
    for order in ([1, -1], None):
        torch.manual_seed(1)
        layer = WithNone(HIDDEN, HIDDEN, **OPTIONS)
        wanted = _two_microbatches(layer)
        layer.weight.grad = None
        (graphed,) = te.make_graphed_callables((layer,), ((_random().requires_grad_(),),), _order=order)
        errors.append(error(_two_microbatches(graphed), wanted))
    return {"errors": {"microbatches": errors}}


def _two_microbatches(run: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
    torch.manual_seed(2)
    found = []
    for _ in range(2):
        x = _random().requires_grad_()
        out, none = run(x)
        assert none is None
        out.backward(_random())
        assert x.grad is not None
        found += [out.detach().clone(), x.grad.clone()]
    return found


class Shuffled(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """Projections that delay their wgrads, in another order than the one in which they were made."""

    def __init__(self) -> None:
        super().__init__()
        options = {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True, **OPTIONS}
        made = [te.Linear(HIDDEN, HIDDEN, **options) for _ in range(MODULES)]
        order = torch.randperm(MODULES, generator=torch.Generator().manual_seed(3)).tolist()
        self.layers = torch.nn.ModuleList(made[number] for number in order)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def hook_order() -> dict[str, Any]:
    """Whether the wgrad hooks of a callable's modules are run in the order of their forwards (else an error of 1.0).

    Where their order follows from addresses in memory, it is right by chance once in 40,000 times.
    """
    block = Shuffled()
    found: list[int] = []
    for number, layer in enumerate(block.layers):
        layer.weight.main_grad = torch.zeros(HIDDEN, HIDDEN, device="cuda")
        layer.weight.grad_added_to_main_grad = False
        layer.register_wgrad_accumulation_and_reduce_hooks(lambda number=number: found.append(number))
    run = te.make_graphed_callables(block, (_random().requires_grad_(),), allow_unused_input=True)
    out = run(_random().requires_grad_())
    out.backward(torch.ones_like(out))
    found.clear()
    run.backward_dw()
    return {"errors": {"order": [float(found != list(range(MODULES)))]}, "order": list(found)}


def plain_data() -> dict[str, Any]:
    """The errors of delayed wgrads in each step, where the first of two projections gets data without gradients."""
    found, wanted = (_delayed_wgrads(graphed) for graphed in (True, False))
    return {"errors": {"wgrads": [error([one], [right]) for one, right in zip(found, wanted, strict=True)]}}


def _delayed_wgrads(graphed: bool) -> list[torch.Tensor]:
    torch.manual_seed(1)
    layers = [kind(HIDDEN, HIDDEN, delay_wgrad_compute=True, **OPTIONS) for kind in (te.Linear, te.LayerNormLinear)]
    first, second = layers
    if graphed:
        first = te.make_graphed_callables(first, (_random(),), allow_unused_input=True)
        second = te.make_graphed_callables(second, (_random().requires_grad_(),), allow_unused_input=True)
    torch.manual_seed(2)
    found = []
    for _ in range(2):
        for layer in layers:
            layer.weight.grad = None
        out = second(first(_random()))
        out.backward(_random())
        for run in (second, first):
            run.backward_dw()
        found += [torch.zeros_like(each.weight) if each.weight.grad is None else each.weight.grad for each in layers]
    return [grad.clone() for grad in found]


def _random() -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
