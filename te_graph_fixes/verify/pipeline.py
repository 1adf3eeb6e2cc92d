"""Gradients on their way to the previous pipeline stage.

The gradient that leaves the first layer of a model chunk is sent, and Megatron-Core waits for the send once the next
model chunk's backward, and the forward that overlaps it, have been issued. Here the receiver reads it as late as that
allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .driver.comparison import error
from .driver.program import Program
from .driver.setting import HIDDEN, TOKENS, use
from .driver.training import Training

ORDER = (
    *(1, 2, 1, 2, 3, 4, 3, 4, 1, 2, 1, -4, 2, -3, 3, -4),
    *(4, -3, 3, -2, 4, -1, -2, -1, -4, -3, -4, -3, -2, -1, -2, -1),
)
"""Two model chunks of two layers, each layer a chunk of its own as under ``overlap_moe_expert_parallel_comm``, four
microbatches, the first of two stages."""


def sent_gradients(
    order: Sequence[int] = ORDER, sizes: Sequence[int] = (2, 2), first_stage: bool = False, module: str = "linear"
) -> dict[str, Any]:
    """The share of the sent gradients that change before they are received, and the error of what is received.

    ``sizes`` is the number of layers of each model chunk. On the ``first_stage`` the first one sends nothing, and the
    backwards of the cooldown wait for what they send, which comes after all that was sent before: Megatron-Core without
    ``overlap_p2p_comm_warmup_flush``.
    """
    use(Program(modules=(module,) * sum(sizes), fused=True, order=tuple(order), reuse=True))
    training = Training(graphed=True)
    first = [sum(sizes[:i]) + 1 for i in range(len(sizes))]
    eager = _received(order, first, first_stage, training.eager)
    received = _received(order, first, first_stage, training.calls)
    changed = [not torch.equal(tensor, copy) for tensor, copy in received]
    return {
        "errors": {
            "changed": [sum(changed) / len(changed)],
            "received": [error([tensor for tensor, _ in received], [tensor for tensor, _ in eager])],
        }
    }


def _received(
    order: Sequence[int], first: Sequence[int], first_stage: bool, runs: Sequence[Sequence[Any]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each sent gradient as it is received, and as it was when its send began."""
    torch.manual_seed(3)
    inputs = torch.randn(len(runs), order.count(1), TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    output_grads = torch.randn_like(inputs)
    counts: dict[float, int] = {}
    leaves: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    sent: list[tuple[torch.Tensor, torch.Tensor]] = []
    received = []
    last_forward = max(i for i, entry in enumerate(order) if entry > 0)
    last_steady = next(i for i, entry in enumerate(order) if i > last_forward and -entry in first)
    for i, entry in enumerate(order):
        if len(sent) > 1 and not (entry > 0 and entry not in first):
            tensor, copy = sent.pop(0)
            received.append((tensor.clone(), copy))
        layer, microbatch = abs(entry) - 1, counts.get(entry, 0)
        counts[entry] = microbatch + 1
        if entry > 0:
            x = inputs[layer, microbatch].clone().requires_grad_()
            leaves[layer, microbatch] = x, runs[layer][microbatch](x)
        else:
            x, out = leaves.pop((layer, microbatch))
            (grad,) = torch.autograd.grad(out, x, output_grads[layer, microbatch])
            if -entry in first[first_stage:]:
                sent.append((grad, grad.clone()))
                if first_stage and i > last_steady:
                    received += [(tensor.clone(), copy) for tensor, copy in sent]
                    sent.clear()
    return received + [(tensor.clone(), copy) for tensor, copy in sent]
