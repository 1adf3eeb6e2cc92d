"""Static buffers are handed on to layers that they do not fit: exits with 1 if results are wrong."""

import sys

import torch
import transformer_engine.pytorch as te

SIZE = 128
ORDER = [1, 2, -2, -1, 1, 2, -2, -1]


def random() -> torch.Tensor:
    return torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda")


class Layer(te.Linear):
    """A projection of two inputs, and its signs, which need no gradient."""

    place = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = super().forward(x + 2 * y)
        return (out, out.detach().sign()) if self.place == 0 else (out.detach().sign(), out)


def train(graphed: bool, grads: tuple[bool, bool], twice: bool = False, place: int = 0) -> list[torch.Tensor]:
    """Outputs, and gradients of inputs and weights, of two layers that are chunks of an order."""
    torch.manual_seed(1)
    layers = [Layer(SIZE, SIZE, bias=False, params_dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    layers[0].place = place

    def inputs(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = random().requires_grad_(grads[layer]), random()
        return (x, x) if twice and layer == 0 else (x, y)

    runs = [layer for layer in layers for _ in range(2)]
    if graphed:
        samples = [inputs(layer) for layer in (0, 0, 1, 1)]
        options = {"sample_kwargs": [{}] * 4, "_order": ORDER, "_num_layers_per_chunk": [1, 1]}
        runs = te.make_graphed_callables(tuple(layers), samples, **options, _reuse_graph_input_output_buffers=True)
    torch.manual_seed(2)
    found, live = [], {}
    for number, entry in enumerate(ORDER):
        layer = abs(entry) - 1
        if entry > 0:
            given = inputs(layer)
            out = runs[2 * layer + number // 4](*given)[layers[layer].place]
            live[layer] = out, [leaf for leaf in (given[0], layers[layer].weight) if leaf.requires_grad]
            found.append(out.detach().clone())
        else:
            out, leaves = live[layer]
            gradients = torch.autograd.grad(out, leaves, random(), allow_unused=True)
            found += [torch.zeros_like(x) if g is None else g.clone() for x, g in zip(leaves, gradients, strict=True)]
    return found


wrong = False
for name, how in {
    "the input of the first layer needs no gradient": {"grads": (False, True)},
    "the first layer gets one tensor twice": {"grads": (False, False), "twice": True},
    "the first layer returns its outputs the other way round": {"grads": (True, True), "place": 1},
}.items():
    eager, graphed = train(False, **how), train(True, **how)
    off = max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(graphed, eager, strict=True))
    print(f"{name}: off by {off:.3g} of its norm")
    wrong = wrong or off > 0
sys.exit(wrong)
