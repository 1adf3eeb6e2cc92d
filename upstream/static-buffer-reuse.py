"""Layers must share static buffers only if all properties of the buffers agree."""

import pytest
import torch
from transformer_engine.pytorch import Linear, make_graphed_callables


class _TwoOutputs(Linear):
    """A linear layer with two inputs. It returns its output, at index ``place``, and its signs."""

    place = 0

    def forward(self, inp: torch.Tensor, other: torch.Tensor) -> tuple:
        out = super().forward(inp + 2 * other)
        signs = out.detach().sign()
        return (out, signs) if self.place == 0 else (signs, out)


def _random() -> torch.Tensor:
    return torch.randn(128, 128, dtype=torch.bfloat16, device="cuda")


def _train_two_chunks(*, graphed: bool, grads: tuple, twice: bool, place: int) -> list:
    """Return the outputs and gradients of two layers, which are the chunks of an order."""
    order = [1, 2, -2, -1, 1, 2, -2, -1]
    torch.manual_seed(1)
    layers = [
        _TwoOutputs(128, 128, bias=False, params_dtype=torch.bfloat16, device="cuda")
        for _ in range(2)
    ]
    layers[0].place = place

    def inputs(layer: int) -> tuple:
        inp, other = _random().requires_grad_(grads[layer]), _random()
        return (inp, inp) if twice and layer == 0 else (inp, other)

    runs = [layer for layer in layers for _ in range(2)]
    if graphed:
        runs = make_graphed_callables(
            tuple(layers),
            [inputs(layer) for layer in (0, 0, 1, 1)],
            sample_kwargs=[{}] * 4,
            _order=order,
            _num_layers_per_chunk=[1, 1],
            _reuse_graph_input_output_buffers=True,
        )
    torch.manual_seed(2)
    found, live = [], {}
    for number, entry in enumerate(order):
        layer = abs(entry) - 1
        if entry > 0:
            given = inputs(layer)
            out = runs[2 * layer + number // 4](*given)[layers[layer].place]
            leaves = [leaf for leaf in (given[0], layers[layer].weight) if leaf.requires_grad]
            live[layer] = out, leaves
            found.append(out.detach().clone())
        else:
            out, leaves = live[layer]
            gradients = torch.autograd.grad(out, leaves, _random(), allow_unused=True)
            for leaf, grad in zip(leaves, gradients):
                found.append(torch.zeros_like(leaf) if grad is None else grad.clone())
    return found


@pytest.mark.parametrize(
    "grads, twice, place",
    (
        ((False, True), False, 0),  # the input of the first layer needs no gradient
        ((False, False), True, 0),  # the first layer gets one tensor twice
        ((True, True), False, 1),  # the first layer returns its outputs in another order
    ),
)
def test_make_graphed_callables_reuses_fitting_buffers(grads, twice, place) -> None:
    """Different layers in one order must have the outputs and gradients of eager training."""
    kwargs = {"grads": grads, "twice": twice, "place": place}
    found = _train_two_chunks(graphed=True, **kwargs)
    assert all(map(torch.equal, found, _train_two_chunks(graphed=False, **kwargs)))
