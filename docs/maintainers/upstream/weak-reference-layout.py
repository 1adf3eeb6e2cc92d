"""Reused outputs and grad inputs lose their strides, or their dtype is refused: exits with 1 if results are wrong."""

import sys
from collections.abc import Callable

import torch
import transformer_engine.pytorch as te

SIZE, TOKENS = 128, 256
ORDER = [1, 1, -1, -1]
View = Callable[[torch.Tensor], torch.Tensor]


def random() -> torch.Tensor:
    return torch.randn(TOKENS, SIZE, dtype=torch.bfloat16, device="cuda")


class Layer(te.Linear):
    """A projection of a transposed input, and a view of its output."""

    def __init__(self, view: View) -> None:
        super().__init__(SIZE, SIZE, bias=False, params_dtype=torch.bfloat16, device="cuda")
        self.view_of = view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.view_of(super().forward(x.t()))


def train(view: View, graphed: bool) -> list[torch.Tensor]:
    """Outputs and gradients of the inputs of two microbatches."""
    torch.manual_seed(1)
    layer = Layer(view)
    runs = [layer, layer]
    if graphed:
        samples = [(random().t().requires_grad_(),) for _ in runs]
        options = {"sample_kwargs": [{}] * 2, "_order": ORDER, "_num_layers_per_chunk": [1]}
        runs = te.make_graphed_callables((layer,), samples, **options, _reuse_graph_input_output_buffers=True)
    torch.manual_seed(2)
    inputs = [random().t().requires_grad_() for _ in runs]
    outs = [run(x) for run, x in zip(runs, inputs, strict=True)]
    found = [out.detach().clone() for out in outs]
    for out, x in zip(outs, inputs, strict=True):
        found += [grad.clone() for grad in torch.autograd.grad(out, x, torch.randn_like(out))]
    return found


wrong = False
for name, view in {
    "y": lambda y: y,
    "y.t()": lambda y: y.t(),
    "y.chunk(2, 1)[1]": lambda y: y.chunk(2, 1)[1],
    "y[:, ::2]": lambda y: y[:, ::2],
    "y[:, None].expand(-1, 3, -1)": lambda y: y[:, None].expand(-1, 3, -1),
    "y.double()": lambda y: y.double(),
}.items():
    try:
        pairs = list(zip(train(view, True), train(view, False), strict=True))
    except RuntimeError as error:
        print(f"{name}: {error}")
        wrong = True
        continue
    off = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs]
    print(f"{name}: outputs off by {max(off[:2]):.3g}, gradients by {max(off[2:]):.3g} of their norm")
    wrong = wrong or any(a.tolist() != b.tolist() for a, b in pairs)
sys.exit(wrong)
