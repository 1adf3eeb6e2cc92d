"""Legal orders with delayed weight gradients must be correct. Illegal orders must be rejected."""

from typing import List

import pytest
import torch
from transformer_engine.pytorch import Linear, make_graphed_callables


def _train_in_order(order: List[float], *, graphed: bool) -> torch.Tensor:
    """Run the entries of ``order``. Return the stacked main_grads of the one-layer chunks."""
    chunks = int(max(order))
    microbatches = order.count(1)
    torch.manual_seed(1)
    layers = []
    for _ in range(chunks):
        layer = Linear(
            128,
            128,
            bias=False,
            params_dtype=torch.bfloat16,
            fuse_wgrad_accumulation=True,
            delay_wgrad_compute=graphed,
        )
        layer.weight.main_grad = torch.zeros(128, 128, device="cuda")
        layer.weight.grad_added_to_main_grad = False
        layers.append(layer)
    inputs = torch.randn(chunks, microbatches, 64, 128, dtype=torch.bfloat16, device="cuda")
    grad_outputs = torch.randn_like(inputs)
    calls = [layer for layer in layers for _ in range(microbatches)]
    if graphed:
        calls = make_graphed_callables(
            tuple(layers),
            [(torch.randn_like(inputs[0, 0]).requires_grad_(),) for _ in calls],
            sample_kwargs=[{} for _ in calls],
            allow_unused_input=True,
            _order=order,
            _num_layers_per_chunk=[1] * chunks,
            _reuse_graph_input_output_buffers=True,
        )
        for layer in layers:
            layer.weight.main_grad.zero_()
    done = dict.fromkeys(order, 0)
    outputs = {}
    for entry in order:
        chunk, microbatch = int(abs(entry)) - 1, done[entry]
        done[entry] += 1
        index = chunk * microbatches + microbatch
        if entry > 0:
            outputs[index] = calls[index](inputs[chunk, microbatch].clone().requires_grad_())
        elif entry == int(entry):
            outputs[index].backward(grad_outputs[chunk, microbatch])
        elif graphed:
            calls[index].backward_dw()
    return torch.stack([layer.weight.main_grad for layer in layers])


@pytest.mark.parametrize(
    "order",
    (
        [1, 1, -1, -1, -1.5, -1.5],  # two dgrads before the first wgrad
        [1, -1, 1, -1.5, -1, -1.5],  # a forward between a dgrad and its wgrad
        [1, 2, -2, -1, -2.5, -1.5],  # another chunk's dgrad between a dgrad and its wgrad
    ),
    ids=str,
)
def test_make_graphed_callables_with_delayed_wgrad_order(order: List[float]) -> None:
    """Weight gradients must be the same as in eager training, which does not delay them."""
    assert torch.equal(_train_in_order(order, graphed=True), _train_in_order(order, graphed=False))


def test_make_graphed_callables_rejects_wgrad_before_dgrad() -> None:
    """An order with a wgrad before its dgrad must raise a ValueError."""
    with pytest.raises(ValueError, match="order"):
        _train_in_order([1, -1.5, -1], graphed=True)
