"""Cached NVFP4 weights in a graph for each microbatch, on a GPU of capability 12.x: wrong outputs, exits with 1."""

import sys

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import NVFP4BlockScaling

SIZE, MICROBATCHES = 128, 3
recipe = NVFP4BlockScaling()
torch.manual_seed(1)
module = te.Linear(SIZE, SIZE, bias=False, params_dtype=torch.bfloat16, device="cuda")
batches = torch.randn(MICROBATCHES, SIZE, SIZE, dtype=torch.bfloat16, device="cuda")


def forward(runs: list) -> list[torch.Tensor]:
    found = []
    for number, (run, batch) in enumerate(zip(runs, batches, strict=True)):
        with te.autocast(enabled=True, recipe=recipe):
            found.append(run(batch.clone().requires_grad_(), is_first_microbatch=number == 0).detach().clone())
    return found


wanted = forward([module] * MICROBATCHES)
runs = te.make_graphed_callables(
    (module,),
    [(batch.clone().requires_grad_(),) for batch in batches],
    _order=[1] * MICROBATCHES + [-1] * MICROBATCHES,
    _num_layers_per_chunk=[1],
    enabled=True,
    recipe=recipe,
    cache_quantized_params=True,
)
wrong = 0
for number, (found, right) in enumerate(zip(forward(runs), wanted, strict=True)):
    error = float((found.float() - right.float()).norm() / right.float().norm())
    if error:
        wrong += 1
        print(f"microbatch {number}: the output is off by {error:.2f} of its norm")
sys.exit(wrong > 0)
