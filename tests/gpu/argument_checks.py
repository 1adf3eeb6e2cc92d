"""What a call of a graph costs the CPU: prints microseconds, the least of several runs, as one JSON line.

python tests/gpu/argument_checks.py
TE_GRAPH_FIXES_DISABLE=replay-arguments python tests/gpu/argument_checks.py
"""

from __future__ import annotations

import json
import time

import torch
import transformer_engine.pytorch as te

import te_graph_fixes

SIZE, CALLS, RUNS = 128, 200, 40


def microseconds(nested: bool) -> float:
    """For a forward without gradients, given one tensor, or two in a dict."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = te.Linear(SIZE, SIZE, params_dtype=torch.bfloat16, device="cuda")

        def forward(self, x: torch.Tensor, others: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
            return self.linear(x if others is None else x + others["a"] + others["b"])

    x = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
    options = {"others": {"a": x.clone(), "b": x.clone()}} if nested else {}
    run = te.make_graphed_callables(Layer().eval(), (x,), sample_kwargs=dict(options))
    found = []
    with torch.no_grad():
        for _ in range(RUNS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                run(x, **options)
            found.append((time.perf_counter() - start) / CALLS * 1e6)
            torch.cuda.synchronize()
    return round(min(found), 2)


if __name__ == "__main__":
    report = te_graph_fixes.report()
    applied = report.fixes["replay-arguments"].status
    print(
        json.dumps(
            {
                "te": report.te_version,
                "replay-arguments": applied,
                "tensor": microseconds(False),
                "dict": microseconds(True),
            }
        )
    )
