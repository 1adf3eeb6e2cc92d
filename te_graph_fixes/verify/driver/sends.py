"""An event: gradients on their way to the previous pipeline stage.

The gradient that leaves the first layer of a model chunk is sent, and Megatron-Core waits for the send once the next
model chunk's backward, and the forward that overlaps it, have been issued. Here the receiver reads it as late as that
allows.
"""

from __future__ import annotations

import torch

from .setting import program, random
from .training import Training, event


@event
def step_with_sends(t: Training) -> None:
    """Each layer is a chunk of the order. See what is received, and whether it changed since its send began.

    On the first stage the first model chunk sends nothing, and the backwards of the cooldown wait for what they send,
    which comes after all that was sent before: Megatron-Core without ``overlap_p2p_comm_warmup_flush``.
    """
    order, first_stage = [int(entry) for entry in program.order], program.first_stage
    first_layers = [sum(program.model_chunks[:number]) + 1 for number in range(len(program.model_chunks))]
    last_forward = max(i for i, entry in enumerate(order) if entry > 0)
    last_steady = next(i for i, entry in enumerate(order) if i > last_forward and -entry in first_layers)
    counts: dict[int, int] = {}
    live: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    sent: list[tuple[torch.Tensor, torch.Tensor]] = []

    def receive(number: int) -> None:
        for tensor, copy in sent[:number]:
            t.see("received", tensor)
            t.see("changed", (tensor != copy).any())
        del sent[:number]

    for i, entry in enumerate(order):
        if len(sent) > 1 and not (entry > 0 and entry not in first_layers):
            receive(1)
        layer, microbatch = abs(entry) - 1, counts.get(entry, 0)
        counts[entry] = microbatch + 1
        if entry > 0:
            x = random().requires_grad_()
            live[layer, microbatch] = x, t.calls[layer][microbatch](x)
            continue
        x, out = live.pop((layer, microbatch))
        (grad,) = torch.autograd.grad(out, x, random())
        if -entry in first_layers[first_stage:]:
            sent.append((grad, grad.clone()))
            if first_stage and i > last_steady:
                receive(len(sent))
    receive(len(sent))
