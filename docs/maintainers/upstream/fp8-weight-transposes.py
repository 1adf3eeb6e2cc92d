"""Dgrads of graphs with FP8 primary weights after updates, against eager ones: exits with 1 if they differ."""

import sys
from unittest import mock

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.tensor.utils import cast_master_weights_to_fp8

SIZE = 256
RECIPE = DelayedScaling()


def train(no_grad: bool, graph: bool) -> list[torch.Tensor]:
    """The dgrads of three steps. The weight is written by an optimizer's ``copy_``, or by TE's function for ZeRO."""
    te.quantization.FP8GlobalStateManager.reset()
    torch.manual_seed(1)
    with torch.set_grad_enabled(not no_grad), te.quantized_model_init(recipe=RECIPE):
        module = te.Linear(SIZE, SIZE, bias=False, params_dtype=torch.bfloat16, device="cuda")
    batches = torch.randn(3, SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
    weights = torch.randn_like(batches)
    run = module
    if graph:
        sample = (torch.randn_like(batches[0]).requires_grad_(),)
        run = te.make_graphed_callables(module, sample, enabled=True, recipe=RECIPE)
    dgrads = []
    for batch, weight in zip(batches, weights, strict=True):
        x = batch.clone().requires_grad_()
        with te.autocast(enabled=True, recipe=RECIPE):
            out = run(x)
        out.backward(batch)
        dgrads.append(x.grad.clone())
        with torch.no_grad():
            if no_grad:
                module.weight.copy_(weight)
            else:
                with mock.patch("torch.distributed.all_reduce"):  # one rank
                    cast_master_weights_to_fp8([module.weight], [weight.float().view(-1)], [0], None)
    return dgrads


wrong = 0
for no_grad in (False, True):
    for step, (found, wanted) in enumerate(zip(train(no_grad, True), train(no_grad, False), strict=True)):
        error = float((found.float() - wanted.float()).norm() / wanted.float().norm())
        if error:
            wrong += 1
            how = "built under no_grad, copy_" if no_grad else "cast_master_weights_to_fp8"
            print(f"{how}: the dgrad of step {step} is off by {error:.2f} of its norm")
sys.exit(wrong > 0)
