"""A graph for inference whose module trains as well, with cached FP8 weights: exits with 1 if its outputs are wrong."""

import sys

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

SIZE = 256
RECIPE = Float8CurrentScaling()
torch.manual_seed(1)
module = te.Linear(SIZE, SIZE, bias=False, params_dtype=torch.bfloat16, device="cuda")
x = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
eager = module.forward

module.eval()
with torch.no_grad():
    te.make_graphed_callables(module, (x.clone(),), enabled=True, recipe=RECIPE, cache_quantized_params=True)
graph, module.forward = module.forward, eager


def infer(run: object, first: bool) -> torch.Tensor:
    module.eval()
    with torch.no_grad(), te.autocast(enabled=True, recipe=RECIPE):
        return run(x, is_first_microbatch=first).clone()  # type: ignore[operator]


def train(first: bool) -> None:
    module.train()
    with te.autocast(enabled=True, recipe=RECIPE):
        out = eager(x.clone().requires_grad_(), is_first_microbatch=first)
    out.backward(x)
    dirt = [torch.full((SIZE * SIZE,), 0x7F, dtype=torch.uint8, device="cuda") for _ in range(64)]
    del dirt


wrong = 0
infer(graph, first=True)
for step in range(3):
    with torch.no_grad():
        module.weight.copy_(torch.randn_like(module.weight))
    train(first=True)  # quantizes the weights
    found, wanted = infer(graph, first=False), infer(eager, first=False)
    error = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    if error:
        wrong += 1
        print(f"step {step}: the output of the graph is off by {error:.2f} of its norm")
sys.exit(wrong > 0)
