"""Dummies in TransformerEngine's graphs: prints whether a fused weight's gradient is copied at each replay.

python fused-dummy-copies.py
"""

from __future__ import annotations

import sys

import torch
import transformer_engine.pytorch as te

HIDDEN, TOKENS = 128, 64
OPTIONS = {"dtype": torch.bfloat16, "device": "cuda"}

layer = te.Linear(HIDDEN, HIDDEN, bias=False, fuse_wgrad_accumulation=True, params_dtype=torch.bfloat16, device="cuda")
layer.weight.main_grad = torch.zeros(HIDDEN, HIDDEN, device="cuda")
layer.weight.grad_added_to_main_grad = False
sample = torch.randn(TOKENS, HIDDEN, requires_grad=True, **OPTIONS)
run = te.make_graphed_callables(layer, (sample,))
places = set()
kept = []
for _ in range(3):
    out = run(torch.randn(TOKENS, HIDDEN, requires_grad=True, **OPTIONS))
    out.backward(torch.randn_like(out))
    kept.append(layer.weight.grad)
    places.add(layer.weight.grad.data_ptr())
    layer.weight.grad = None
print(f"{len(places)} gradients that stand for a wgrad in main_grad, of {len(kept)} replays")
sys.exit(len(places) > 1)
