"""The order of gradient hooks after a replayed ``backward_dw``: prints one JSON line. Runs on the simulator as well.

python tests/gpu/wgrad_hook_order.py
TE_GRAPH_FIXES=off python tests/gpu/wgrad_hook_order.py
"""

from __future__ import annotations

import json

import torch
import transformer_engine.pytorch as te

import te_graph_fixes

LAYERS = 8
HIDDEN = 64


def hook_order() -> list[int]:
    """The layers in the order in which their hooks are run."""
    options = {"bias": False, "fuse_wgrad_accumulation": True, "delay_wgrad_compute": True, "device": "cuda"}
    model = torch.nn.Sequential(
        *(te.Linear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16, **options) for _ in range(LAYERS))
    )
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
    x = torch.randn(32, HIDDEN, dtype=torch.bfloat16, device="cuda").requires_grad_()
    run = te.make_graphed_callables(model, (x,), allow_unused_input=True)
    order: list[int] = []
    for number, layer in enumerate(model):
        layer.register_wgrad_accumulation_and_reduce_hooks(lambda number=number: order.append(number))
    out = run(x)
    out.backward(torch.ones_like(out))
    run.backward_dw()
    return order


if __name__ == "__main__":
    report = te_graph_fixes.report()
    applied = [fix for fix, status in report.fixes.items() if status.status == "applied"]
    print(json.dumps({"te": report.te_version, "applied": applied, "order": hook_order()}))
