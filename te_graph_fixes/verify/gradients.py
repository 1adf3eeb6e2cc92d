"""Gradients that a graph gives to parameters: what is delivered, to whom, and which weights they were computed with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformer_engine.pytorch as te

from .driver.comparison import error, errors
from .driver.program import Program
from .driver.replays import backward, forward
from .driver.setting import HIDDEN, random, sample, use
from .driver.training import Training

OPTIONS: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cuda"}
STEPS = 3
ORDER = (1, 1, 2, 2, 1, -2, 1, -2, 2, -1, 2, -1, -2, -2, -1, -1)
"""One of two stages, two chunks of two layers, four microbatches."""


class Output(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """A plain product with a weight that another module has too."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)


def tied_weight() -> dict[str, Any]:
    """A weight with fused wgrad in one graph, and without in another: the error of the other's gradients, kept."""
    wanted, found = (_train_tied(graphed) for graphed in (False, True))
    return {"errors": {"kept": [error(found, wanted)]}}


def _train_tied(graphed: bool) -> list[torch.Tensor]:
    torch.manual_seed(1)
    layer = te.Linear(HIDDEN, HIDDEN, bias=False, fuse_wgrad_accumulation=True, **OPTIONS)
    weight = layer.weight
    weight.main_grad = torch.zeros(weight.shape, device="cuda")
    weight.grad_added_to_main_grad = False
    runs: list[Any] = [layer, Output(weight)]
    if graphed:
        runs = [te.make_graphed_callables(run, (sample().requires_grad_(),)) for run in runs]
    torch.manual_seed(2)
    kept = []
    weight.main_grad.zero_()
    for _ in range(STEPS):
        for run in runs:
            weight.grad = None
            out = run(random().requires_grad_())
            out.backward(torch.randn_like(out))
        kept.append(weight.grad)
    return [*(grad for grad in kept if grad is not None), weight.main_grad]


def fused_mlps() -> dict[str, Any]:
    """Chunks with fused wgrads whose ``.grad`` stays set from microbatch to microbatch; and the share of copies.

    ``copied`` is the share of the weights' gradients that are not TE's shared dummies, there and without an order.
    """
    mlps = Program(modules=("layernorm_mlp",) * 4, bias=True, fused=True, order=ORDER, reuse=True, clean_start=True)
    use(mlps)
    eager, graphed = (_microbatches(Training(each)) for each in (False, True))
    use(Program(modules=("layernorm_mlp",), bias=True, fused=True))
    other = Training(graphed=True)
    forward(other)
    backward(other)
    return {
        "errors": {
            "gradients": [max(errors(graphed.seen, eager.seen).values())],
            "copied": [_copied(graphed.layers), _copied(other.layers)],
        }
    }


def _microbatches(training: Training) -> Training:
    """Run the order, and see the gradients that it leaves."""
    torch.manual_seed(2)
    counts: dict[float, int] = {}
    under_way: list[float] = []
    for entry in ORDER:
        if entry > 0:
            forward(training, counts.get(entry, 0), *training.chunk(entry - 1))
            counts[entry] = counts.get(entry, 0) + 1
            under_way.append(-entry)
        else:
            place = under_way.index(entry)
            del under_way[place]
            backward(training, place)
    for each in training.parameters:
        training.see("wgrads", each.main_grad if each in training.weights else each.grad)
    return training


def _copied(layers: Sequence[Any]) -> float:
    dummies = {dummy.data_ptr() for dummy in te.module.base._dummy_wgrads.values()}
    grads = [parameter.grad for layer in layers for parameter in layer.parameters() if parameter.dim() == 2]
    return sum(grad is None or grad.data_ptr() not in dummies for grad in grads) / len(grads)
