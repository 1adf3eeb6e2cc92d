"""Gradients that a graph gives to parameters: what is delivered, to whom, and which weights they were computed with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformer_engine.pytorch as te

from .driver.comparison import error
from .driver.setting import HIDDEN, TOKENS

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
    (layer,) = _fused(te.Linear(HIDDEN, HIDDEN, bias=False, fuse_wgrad_accumulation=True, **OPTIONS))
    weight = layer.weight
    runs: list[Any] = [layer, Output(weight)]
    if graphed:
        runs = [te.make_graphed_callables(run, (_random(),)) for run in runs]
    torch.manual_seed(2)
    kept = []
    weight.main_grad.zero_()
    for _ in range(STEPS):
        for run in runs:
            weight.grad = None
            out = run(_random())
            out.backward(torch.randn_like(out))
        kept.append(weight.grad)
    return [*(grad for grad in kept if grad is not None), weight.main_grad]


def fused_mlps(microbatches: int = 4) -> dict[str, Any]:
    """Chunks with fused wgrads whose ``.grad`` stays set from microbatch to microbatch; and the share of copies.

    ``copied`` is the share of the weights' gradients that are not TE's shared dummies, there and without an order.
    """
    torch.manual_seed(1)
    *layers, other = _fused(
        *(te.LayerNormMLP(HIDDEN, HIDDEN, fuse_wgrad_accumulation=True, **OPTIONS) for _ in range(5))
    )
    eager = [layer for layer in layers for _ in range(microbatches)]
    wanted = _train_mlps(layers, eager, microbatches)
    samples = [(_random(),) for _ in eager]
    graphed = te.make_graphed_callables(
        tuple(layers),
        samples,
        sample_kwargs=[{} for _ in samples],
        _order=list(ORDER),
        _num_layers_per_chunk=[2, 2],
        _reuse_graph_input_output_buffers=True,
    )
    # TE numbers graphs by chunk, then microbatch, then layer.
    runs = [
        graphed[(chunk * microbatches + microbatch) * 2 + layer]
        for chunk in range(2)
        for layer in range(2)
        for microbatch in range(microbatches)
    ]
    found = _train_mlps(layers, runs, microbatches)
    te.make_graphed_callables(other, (_random(),))(_random()).sum().backward()
    return {"errors": {"gradients": [error(found, wanted)], "copied": [_copied(layers), _copied([other])]}}


def _copied(layers: Sequence[Any]) -> float:
    dummies = {dummy.data_ptr() for dummy in te.module.base._dummy_wgrads.values()}
    grads = [parameter.grad for layer in layers for parameter in layer.parameters() if parameter.dim() == 2]
    return sum(grad is None or grad.data_ptr() not in dummies for grad in grads) / len(grads)


def _train_mlps(layers: Sequence[Any], runs: Sequence[Any], microbatches: int) -> list[torch.Tensor]:
    for layer in layers:
        for parameter in layer.parameters():
            parameter.main_grad.zero_()
            parameter.grad = None
    torch.manual_seed(2)
    inputs = torch.randn(2, microbatches, TOKENS, HIDDEN, **_bf16())
    output_grads = torch.randn_like(inputs)
    counts: dict[int, int] = {}
    live: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    found = []
    for entry in ORDER:
        chunk, microbatch = abs(entry) - 1, counts.get(entry, 0)
        counts[entry] = microbatch + 1
        if entry > 0:
            x = out = inputs[chunk, microbatch].clone().requires_grad_()
            for layer in (2 * chunk, 2 * chunk + 1):
                out = runs[layer * microbatches + microbatch](out)
            live[chunk, microbatch] = x, out
        else:
            x, out = live.pop((chunk, microbatch))
            out.backward(output_grads[chunk, microbatch])
            found.append(_grad(x))
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    return found + [each.main_grad.clone() if each.dim() == 2 else _grad(each) for each in parameters]


def _fused(*layers: Any) -> list[Any]:
    """The layers, with what Megatron's DDP gives to every parameter."""
    for layer in layers:
        for parameter in layer.parameters():
            parameter.main_grad = torch.zeros(parameter.shape, device="cuda")
            parameter.grad_added_to_main_grad = False
    return list(layers)


def _bf16() -> dict[str, Any]:
    return {"dtype": torch.bfloat16, "device": "cuda"}


def _random() -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, requires_grad=True, **_bf16())


def _grad(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad.clone()
