"""Hooks of parameters in TransformerEngine's graphs: prints what a hook has added up, relative to eager.

python parameter-hooks.py
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformer_engine.pytorch as te

HIDDEN, TOKENS, MICROBATCHES = 128, 64, 3


def random() -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda", requires_grad=True)


def total(graphed: bool, take: bool) -> torch.Tensor:
    """The sum of a weight's gradients as a hook computes it, which may ``take`` them away."""
    torch.manual_seed(1)
    layer = te.Linear(HIDDEN, HIDDEN, bias=False, params_dtype=torch.bfloat16, device="cuda")
    found = torch.zeros(HIDDEN, HIDDEN, device="cuda")

    def hook(parameter: Any) -> None:
        found.add_(parameter.grad)
        if take:
            parameter.grad = None

    layer.weight.register_post_accumulate_grad_hook(hook)
    run = te.make_graphed_callables(layer, (random(),)) if graphed else layer
    found.zero_()
    torch.manual_seed(2)
    for _ in range(MICROBATCHES):
        out = run(random())
        out.backward(torch.randn_like(out))
        layer.weight.grad = None
    return found


wrong = 0
for take in (False, True):
    wanted, found = total(False, take), total(True, take)
    error = float((found - wanted).norm() / wanted.norm())
    print(f"hook that {'takes' if take else 'leaves'} the gradient: error {error:.3f}")
    wrong += error != 0
sys.exit(wrong > 0)
