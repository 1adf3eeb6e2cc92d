"""A frozen graph switches off the amax reduction of the backward: exits with 1 if scales differ from the eager ones."""

import sys

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

SIZE, STEPS = 128, 3
RECIPE = DelayedScaling()


def scales(graphed: bool) -> torch.Tensor:
    """The scales of a trained projection's backward behind a frozen one, after a few steps."""
    torch.manual_seed(1)
    frozen, trained = (te.Linear(SIZE, SIZE, params_dtype=torch.bfloat16, device="cuda") for _ in range(2))
    frozen.requires_grad_(False)
    if graphed:
        sample = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
        te.make_graphed_callables(frozen.eval(), (sample,), enabled=True, recipe=RECIPE)
    torch.manual_seed(2)
    for _ in range(STEPS):
        x = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
        with te.autocast(enabled=True, recipe=RECIPE):
            out = trained(frozen(x))
        out.backward(torch.randn_like(out) / 1000)
    return trained.fp8_meta["scaling_bwd"].scale.clone()


eager, graph = scales(graphed=False), scales(graphed=True)
print(f"scales of the backward: eager {eager.tolist()}, behind a frozen graph {graph.tolist()}")
sys.exit(not torch.equal(eager, graph))
