"""Gradients on their way to the previous pipeline stage, where every layer is passed as a chunk.

As in Megatron-Core under ``overlap_moe_expert_parallel_comm``: the gradient that leaves the first layer of a model
chunk is sent, and Megatron waits for the send once the next model chunk's backward, and the forward that overlaps it,
have been issued. Here the receiver reads it as late as that allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from .training import HIDDEN, TOKENS, Setup, capture, error, make_module

ORDER = (
    *(1, 2, 1, 2, 3, 4, 3, 4, 1, 2, 1, -4, 2, -3, 3, -4),
    *(4, -3, 3, -2, 4, -1, -2, -1, -4, -3, -4, -3, -2, -1, -2, -1),
)
"""The first of two stages, two model chunks of two layers, four microbatches."""

LAYERS = (2, 2)


def sent_gradients() -> dict[str, Any]:
    """The share of the sent gradients that change before they are received, and the error of what is received."""
    setup = Setup(order=ORDER, mark_first=False, reuse=True)
    FP8GlobalStateManager.reset()
    layers = [make_module(setup, seed, graphed=True) for seed in range(sum(LAYERS))]
    eager = _received(layers, [layer for layer in layers for _ in range(ORDER.count(1))])
    received = _received(layers, capture(setup, layers, None))
    changed = [not torch.equal(tensor, copy) for tensor, copy in received]
    return {
        "errors": {
            "changed": [sum(changed) / len(changed)],
            "received": [error([tensor for tensor, _ in received], [tensor for tensor, _ in eager])],
        }
    }


def _received(layers: Sequence[Any], runs: Sequence[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each sent gradient as it is received, and as it was when its send began."""
    microbatches = ORDER.count(1)
    first = [sum(LAYERS[:i]) + 1 for i in range(len(LAYERS))]
    torch.manual_seed(3)
    inputs = torch.randn(len(layers), microbatches, TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    output_grads = torch.randn_like(inputs)
    counts: dict[float, int] = {}
    leaves: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    sent: list[tuple[torch.Tensor, torch.Tensor]] = []
    received = []
    for entry in ORDER:
        if len(sent) > 1 and not (entry > 0 and entry not in first):
            tensor, copy = sent.pop(0)
            received.append((tensor.clone(), copy))
        layer, microbatch = abs(entry) - 1, counts.get(entry, 0)
        counts[entry] = microbatch + 1
        if entry > 0:
            x = inputs[layer, microbatch].clone().requires_grad_()
            leaves[layer, microbatch] = x, runs[layer * microbatches + microbatch](x)
        else:
            x, out = leaves.pop((layer, microbatch))
            (grad,) = torch.autograd.grad(out, x, output_grads[layer, microbatch])
            if -entry in first:
                sent.append((grad, grad.clone()))
    return received + [(tensor.clone(), copy) for tensor, copy in sent]
