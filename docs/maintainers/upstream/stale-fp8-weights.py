"""Graphs go on with the FP8 weights of their capture: exits with 1 if outputs after an update are wrong."""

import sys

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

SIZE = 128
RECIPE = Float8CurrentScaling()


class Layer(torch.nn.Module):
    """Marks microbatches as Megatron-Core's modules do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = te.Linear(SIZE, SIZE, bias=False, params_dtype=torch.bfloat16, device="cuda")
        self.is_first_microbatch = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x, is_first_microbatch=self.is_first_microbatch)
        self.is_first_microbatch = False
        return out


torch.manual_seed(2)
x = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
layers = []
for graphed in (False, True):
    layer = Layer()
    if graphed:
        te.make_graphed_callables(layer, (x.clone().requires_grad_(),), enabled=True, recipe=RECIPE)
        layer.is_first_microbatch = False  # TE up to 2.13 sets it to True after the warmup, later ones do not
    layers.append(layer)
wrong = 0
for step in range(2):
    outputs = []
    for layer in layers:
        layer.is_first_microbatch = True
        with te.autocast(enabled=True, recipe=RECIPE):
            outputs.append(layer(x.clone().requires_grad_()).detach().float().clone())
        with torch.no_grad():
            layer.linear.weight.neg_()
    error = float((outputs[1] - outputs[0]).norm() / outputs[0].norm())
    wrong += error > 0
    print(f"step {step}: outputs of the graph are off by {error:.3f} of their norm")
sys.exit(wrong > 0)
