"""Tell autograd which outputs of a graph need a gradient, and reject outputs that TE cannot capture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformer_engine.pytorch.tensor import QuantizedTensor


def refuse_quantized_outputs(function: Any, outputs: Sequence[Any], reuses_buffers: bool) -> None:
    """Raise ValueError for a training graph with quantized outputs, because TE would quantize their gradients too.

    A quantized output without a gradient causes an error only if TE ``reuses_buffers``, because TE then loses the
    output's scale.
    """
    if any(isinstance(output, QuantizedTensor) and (output.requires_grad or reuses_buffers) for output in outputs):
        raise ValueError(
            f"{type(function).__name__} returns a quantized tensor, as with fp8_output=True. A graph would also "
            "quantize its gradient. Capture it together with the module that reads the tensor, or return a tensor in "
            "high precision."
        )


def refuse_backward(_ctx: Any) -> None:
    """Raise RuntimeError, because no backward was captured."""
    raise RuntimeError(
        "This graph has no backward, because it was captured under torch.no_grad(), or its outputs needed no gradient. "
        "Capture it for training."
    )


def mark_outputs(replay: Any, arguments: Any, outputs: Sequence[Any], grad_outputs: Sequence[Any] | None) -> None:
    """Add a step that tells autograd which outputs need no gradient, because they needed none in the capture.

    ``outputs`` and ``grad_outputs`` are the static outputs of the graph and their gradients. The gradients are None if
    no backward was captured. A capture under `torch.no_grad` adds no step, because it shows no outputs with gradients.
    """
    needs_grad = [getattr(output, "requires_grad", False) for output in outputs]
    if grad_outputs is not None:
        needs_grad = [grad is not None for grad in grad_outputs]
    without = [index for index, needs in enumerate(needs_grad) if not needs]

    def mark(ctx: Any, outputs: Sequence[Any]) -> Sequence[Any]:
        if not arguments.need_more_grads(ctx.call.inputs):
            ctx.mark_non_differentiable(*[outputs[index] for index in without if outputs[index] is not None])
        return outputs

    if without and torch.is_grad_enabled():
        replay.add("forward deliver", "mark outputs without gradients", mark)
