"""Graphs with delayed scaling, and an evaluation in bf16 between two steps: exits with 1 if anything is lost by it."""

import sys

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

SIZE = 256
RECIPE = DelayedScaling()
OPTIONS = {"bias": False, "device": "cuda"}
wrong = 0
for kind in ("te.Linear", "te.ops.Linear"):
    if kind == "te.Linear":
        module = te.Linear(SIZE, SIZE, params_dtype=torch.bfloat16, **OPTIONS)
    else:
        module = te.ops.Sequential(te.ops.Linear(SIZE, SIZE, dtype=torch.bfloat16, **OPTIONS))
    x = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
    eager = module.forward
    te.make_graphed_callables(module, (x.clone().requires_grad_(),), enabled=True, recipe=RECIPE)
    graph = module.forward

    def step() -> None:
        with te.autocast(enabled=True, recipe=RECIPE):
            out = graph(x.clone().requires_grad_())  # noqa: B023
        out.backward(x)  # noqa: B023

    def saved() -> bool:
        return any(value.numel() for name, value in module.state_dict().items() if "extra" in name)  # noqa: B023

    step()
    before = saved()
    module.eval()
    with torch.no_grad():
        eager(x)
    module.train()
    try:
        step()
        after = saved()
    except (TypeError, AttributeError) as failure:
        wrong += 1
        print(f"{kind}: the replay after the evaluation raises {type(failure).__name__}: {failure}")
        continue
    if after != before:
        wrong += 1
        print(f"{kind}: FP8 state in a checkpoint: {before} before the evaluation, {after} after it")
sys.exit(wrong > 0)
