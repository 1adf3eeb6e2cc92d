"""Scales of delayed scaling that replays leave as they are: exits with 1 if any differ from the eager ones."""

import sys
from collections.abc import Callable

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

SIZE, STEPS = 128, 3
DELAYED = DelayedScaling()
OPTIONS = {"params_dtype": torch.bfloat16, "device": "cuda"}


class Layer(torch.nn.Module):
    """A projection that is run by ``forward``, or in an autocast of its own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, te.Linear(SIZE, SIZE, **OPTIONS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "sub.forward(x)":
            return self.linear.forward(x)
        if self.way == "te.checkpoint":
            return self.linear(x)
        with te.autocast(enabled=True, recipe=DELAYED):
            return self.linear(x)


def gradients(way: str, graphed: bool) -> list[torch.Tensor]:
    """The gradients of a few steps, with inputs that grow."""
    torch.manual_seed(1)
    recipe = Float8CurrentScaling() if way == "autocast of its own" else DELAYED
    layer = Layer(way) if way != "te.ops.Linear" else te.ops.Linear(SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
    run: Callable[[torch.Tensor], torch.Tensor] = layer
    if graphed:
        sample = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda").requires_grad_()
        te.make_graphed_callables(layer, (sample,), enabled=True, recipe=recipe)
    if way == "te.checkpoint":
        run = lambda x: te.checkpoint(layer, x)  # noqa: E731
    found = []
    torch.manual_seed(2)
    for step in range(STEPS):
        x = (torch.randn(SIZE, SIZE, device="cuda") * 10**step).bfloat16().requires_grad_()
        with te.autocast(enabled=True, recipe=recipe):
            out = run(x)
        out.backward(torch.randn_like(out) / 1000)
        found += [parameter.grad.clone() for parameter in layer.parameters()]
        layer.zero_grad()
    return found


wrong = 0
for way in ("sub.forward(x)", "te.ops.Linear", "autocast of its own", "te.checkpoint"):
    wanted, found = gradients(way, graphed=False), gradients(way, graphed=True)
    errors = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, wanted, strict=True)]
    wrong += max(errors) > 0
    print(f"{way}: gradients of the graph are off by up to {max(errors):.2f} of their norm")
sys.exit(wrong > 0)
