"""Eager calls after a capture of a class and its subclass: prints one JSON line. Runs on the simulator as well.

    python tests/gpu/subclass_autocast.py
    TE_GRAPH_FIXES=off python tests/gpu/subclass_autocast.py

``left`` names the classes that have kept the capture's ``__call__``. ``error`` is that of the eager outputs of a module
of the subclass that was not captured, in FP8, against those before the capture, in bf16.
"""

from __future__ import annotations

import json

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

import te_graph_fixes

HIDDEN = 64


class Dense(te.Linear):
    """As Megatron-Core's ``TransformerLayer``."""


class MoE(Dense):
    """As Megatron-Core's ``MoETransformerLayer``."""


def check() -> dict[str, object]:
    torch.manual_seed(1)
    options = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda"}
    dense, moe, other = (cls(HIDDEN, HIDDEN, **options) for cls in (Dense, MoE, MoE))
    x = torch.randn(32, HIDDEN, dtype=torch.bfloat16, device="cuda")

    def eager() -> torch.Tensor:
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            return other(x).detach().clone()

    before = eager()
    te.make_graphed_callables((dense, moe), tuple((x.clone().requires_grad_(),) for _ in range(2)), enabled=False)
    difference = eager().double() - before.double()
    left = [cls.__name__ for cls in (Dense, MoE) if cls.__call__ is not torch.nn.Module.__call__]
    return {"left": left, "error": float(difference.norm() / before.double().norm())}


if __name__ == "__main__":
    report = te_graph_fixes.report()
    applied = [fix for fix, status in report.fixes.items() if status.status == "applied"]
    print(json.dumps({"te": report.te_version, "applied": applied, **check()}))
