"""What ``replay-contract`` costs: prints one JSON line for each way of training.

    python tests/gpu/contract_cost.py

Four layers (hidden 1024, 512 tokens: the host is slower than the GPU), fused wgrads, in an order of four microbatches
and without one. Both settings, all fixes and all but this one, are captured in this process, and their steps take
turns. ``microseconds`` is what it adds to a replay, ``ratio`` the time of a step with it over that without; each is the
median of the rounds, with the tenth of them that is least, and most.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformer_engine.pytorch as te

import te_graph_fixes

FIX = "replay-contract"
HIDDEN, TOKENS = 1024, 512
LAYERS, MICROBATCHES = 4, 4
ROUNDS, STEPS = 100, 5


def trained(in_order: bool, fp8: bool) -> Callable[[], None]:
    """What runs one step of new layers; a step has 2 * LAYERS * MICROBATCHES replays."""
    options: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cuda", "fuse_wgrad_accumulation": True}
    layers = [te.LayerNormMLP(HIDDEN, HIDDEN, **options) for _ in range(LAYERS)]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.grad_added_to_main_grad = False

    def sample() -> tuple[torch.Tensor]:
        return (torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda", requires_grad=True),)

    quantized = {"enabled": True} if fp8 else {}
    if in_order:
        samples = [sample() for _ in range(LAYERS * MICROBATCHES)]
        kwargs: list[dict[str, Any]] = [{} for _ in samples]
        order = [1] * MICROBATCHES + [-1] * MICROBATCHES
        placing = {"_order": order, "_num_layers_per_chunk": [LAYERS], "_reuse_graph_input_output_buffers": True}
        graphs = te.make_graphed_callables(tuple(layers), samples, sample_kwargs=kwargs, **placing, **quantized)
        microbatches = [graphs[LAYERS * number : LAYERS * (number + 1)] for number in range(MICROBATCHES)]
    else:
        graphs = te.make_graphed_callables(tuple(layers), tuple(sample() for _ in layers), **quantized)
        microbatches = [graphs] * MICROBATCHES
    xs = [torch.randn_like(sample()[0]) for _ in range(MICROBATCHES)]
    output_grad = torch.randn_like(xs[0])

    def forward(graphs: Any, x: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=fp8):
            for graph in graphs:
                x = graph(x)
        return x

    def step() -> None:
        outputs = []
        for graphs, x in zip(microbatches, xs, strict=True):
            outputs.append(forward(graphs, x.requires_grad_()))
            if not in_order:
                outputs.pop().backward(output_grad)
        for output in outputs:
            output.backward(output_grad)
        for parameter in (*xs, *(p for layer in layers for p in layer.parameters())):
            parameter.grad = None

    return step


def seconds(step: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / STEPS


def compare(in_order: bool, fp8: bool, rounds: int) -> dict[str, Any]:
    te_graph_fixes.deactivate()
    te_graph_fixes.activate(disable=[FIX])
    without = trained(in_order, fp8)
    te_graph_fixes.deactivate()
    te_graph_fixes.activate()
    with_fix = trained(in_order, fp8)
    pairs = []
    for turn in range(rounds + 5):
        both = [without, with_fix] if turn % 2 else [with_fix, without]
        times = {step: seconds(step) for step in both}
        if turn >= 5:  # the first are for warming up
            pairs.append((times[with_fix], times[without]))
    replays = 2 * LAYERS * MICROBATCHES

    def spread(values: list[float]) -> dict[str, float]:
        found, tenth = sorted(values), len(values) // 10
        named = zip(
            ("median", "least", "most"), (statistics.median(found), found[tenth], found[-tenth - 1]), strict=True
        )
        return {name: round(value, 4) for name, value in named}

    return {
        "step_ms": round(1000 * statistics.median(off for _, off in pairs), 3),
        "microseconds": spread([1e6 * (on - off) / replays for on, off in pairs]),
        "ratio": spread([on / off for on, off in pairs]),
    }


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if sys.argv[1:] else ROUNDS
    for in_order in (True, False):
        for fp8 in (False, True):
            found = compare(in_order, fp8, rounds)
            print(
                json.dumps({"te": te_graph_fixes.report().te_version, "order": in_order, "fp8": fp8, **found}),
                flush=True,
            )
