"""Modules inside of captured ones lose FP8: exits with 1 if outputs of a graph differ from the eager ones."""

import sys

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

SIZE = 128
RECIPE = Float8CurrentScaling()


def build(graphed: bool) -> torch.nn.Module:
    torch.manual_seed(1)
    linear = [te.Linear(SIZE, SIZE, params_dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    model = torch.nn.Sequential(torch.nn.Sequential(linear[0]), linear[1])
    if graphed:
        sample = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda").requires_grad_()
        te.make_graphed_callables(model, (sample,), enabled=True, recipe=RECIPE)
    return model


torch.manual_seed(2)
x = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
outputs = []
for graphed in (False, True):
    model = build(graphed)
    with te.autocast(enabled=True, recipe=RECIPE):
        outputs.append(model(x.clone().requires_grad_()).detach().float().clone())
error = float((outputs[1] - outputs[0]).norm() / outputs[0].norm())
print(f"Sequential(Sequential(Linear), Linear): outputs of the graph are off by {error:.3f} of their norm")
sys.exit(error > 0)
