"""Callables with outputs that are None, and samples given as tuples: prints one JSON line for a case.

    python tests/gpu/callable_shapes.py none-outputs
    TE_GRAPH_FIXES=off python tests/gpu/callable_shapes.py tuple-samples

``error`` is that of outputs and grads of two microbatches against eager. Runs on the simulator as well.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformer_engine.pytorch as te

import te_graph_fixes

HIDDEN = 64
CASES = ("none-outputs", "none-outputs in order", "tuple-samples")


class Layer(te.Linear):
    """A layer with two outputs, and with two more that are None where ``nones`` is set."""

    nones = False

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        return (
            {"context": None, "out": (out, None), "double": 2 * out}
            if self.nones
            else {"out": (out,), "double": 2 * out}
        )


def train(case: str, graphed: bool) -> list[torch.Tensor]:
    torch.manual_seed(1)
    layer = Layer(HIDDEN, HIDDEN, bias=False, params_dtype=torch.bfloat16, device="cuda")
    layer.nones = case.startswith("none")
    batches = torch.randn(2, 32, HIDDEN, dtype=torch.bfloat16, device="cuda")
    runs: Any = (layer, layer)
    if graphed:
        samples = tuple((torch.randn_like(batches[0]).requires_grad_(),) for _ in range(2))
        if case == "none-outputs":
            runs = (te.make_graphed_callables(layer, samples[0]),) * 2
        else:
            reuse = {"_reuse_graph_input_output_buffers": True} if case == "tuple-samples" else {}
            runs = te.make_graphed_callables((layer,), samples, _order=[1, -1, 1, -1], **reuse)
    values = []
    for microbatch, run in enumerate(runs):
        x = batches[microbatch].clone().requires_grad_()
        found = run(x)
        assert not layer.nones or (found["context"] is None and found["out"][1] is None)
        layer.weight.grad = None
        (found["out"][0].sum() + found["double"].sum()).backward()
        values += [
            value.clone() for value in (found["out"][0].detach(), found["double"].detach(), x.grad, layer.weight.grad)
        ]
    return values


def check(case: str) -> dict[str, Any]:
    try:
        pairs = zip(train(case, graphed=True), train(case, graphed=False), strict=True)
        return {"error": max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)}
    except Exception as failure:
        return {"failed": f"{type(failure).__name__}: {failure}"}


if __name__ == "__main__":
    report = te_graph_fixes.report()
    applied = [fix for fix, status in report.fixes.items() if status.status == "applied"]
    for case in [" ".join(sys.argv[1:])] if sys.argv[1:] else CASES:
        print(json.dumps({"te": report.te_version, "case": case, "applied": applied, **check(case)}), flush=True)
