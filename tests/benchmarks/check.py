"""What a step costs before, during and after a check, against steps without one; a ratio of 1.00 is wanted after it.

python tests/benchmarks/check.py        # a GPU; or: python -m tests.simulator tests/benchmarks/check.py
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import transformer_engine.pytorch as te

import te_graph_fixes

LAYERS, STEPS, CHECKED, ROUNDS = 8, 40, 2, 5


def steps(checked: bool) -> list[float]:
    """Milliseconds of each step."""
    if checked:
        te_graph_fixes.check(CHECKED)
    torch.manual_seed(0)
    options: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cuda"}
    layers = torch.nn.ModuleList(te.LayerNormLinear(256, 256, **options) for _ in range(LAYERS))
    samples = tuple((torch.randn(128, 256, dtype=torch.bfloat16, device="cuda").requires_grad_(),) for _ in layers)
    graphed = te.make_graphed_callables(tuple(layers), samples)
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        x = samples[0][0].detach().clone().requires_grad_()
        for layer in graphed:
            x = layer(x)
        x.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def main() -> None:
    runs: dict[bool, list[list[float]]] = {False: [], True: []}
    for _ in range(ROUNDS):
        for checked in runs:
            runs[checked].append(steps(checked))
    later = {checked: [statistics.median(each[CHECKED + 2 :]) for each in found] for checked, found in runs.items()}
    during = statistics.median(time for each in runs[True] for time in each[:CHECKED])
    without = statistics.median(later[False])
    ratios = sorted(a / b for a, b in zip(later[True], later[False], strict=True))
    print(
        json.dumps(
            {
                "te": te_graph_fixes.report().te_version,
                "ms_without": without,
                "checked_step": during / without,
                "step_after": statistics.median(ratios),
                "step_after_spread": [ratios[0], ratios[-1]],
            }
        )
    )


if __name__ == "__main__":
    main()
