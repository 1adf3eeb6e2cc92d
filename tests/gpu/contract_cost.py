"""What ``replay-contract`` costs: prints one line for each way of training.

    python tests/gpu/contract_cost.py [SECONDS FOR EACH]

Four transformer layers with fused wgrads, four microbatches, in an order and without one; small, as a step that waits
for the host, and large. Both settings, all fixes and all but this one, are captured twice in this process, and their
steps take turns. The microseconds are what the fix adds on the host to a replay, the ratio is the time of a step with
it over that without, until the GPU is done; each is the median of the rounds, with its 95 % interval. What two captures
of one setting differ by says how much of that is chance.
"""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformer_engine.pytorch as te

import te_graph_fixes

FIX = "replay-contract"
SIZES = ((1024, 512), (4096, 4096))
"""Hidden sizes and tokens."""
LAYERS, MICROBATCHES = 4, 4
SECONDS = 14.0


def trained(in_order: bool, hidden: int, tokens: int) -> Callable[[], None]:
    """What runs one step of new layers; a step has 2 * LAYERS * MICROBATCHES replays."""
    options: dict[str, Any] = {"params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": True, "fuse_qkv_params": True}
    options |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    layers = [te.TransformerLayer(hidden, 4 * hidden, hidden // 64, **options).cuda() for _ in range(LAYERS)]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.grad_added_to_main_grad = False

    def sample() -> tuple[torch.Tensor]:
        return (torch.zeros(tokens, 1, hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True),)

    if in_order:
        samples = [sample() for _ in range(LAYERS * MICROBATCHES)]
        kwargs: list[dict[str, Any]] = [{} for _ in samples]
        order = [1] * MICROBATCHES + [-1] * MICROBATCHES
        placing = {"_order": order, "_num_layers_per_chunk": [LAYERS], "_reuse_graph_input_output_buffers": True}
        graphs = te.make_graphed_callables(tuple(layers), samples, sample_kwargs=kwargs, **placing)
        microbatches = [graphs[LAYERS * number : LAYERS * (number + 1)] for number in range(MICROBATCHES)]
    else:
        graphs = te.make_graphed_callables(tuple(layers), tuple(sample() for _ in layers))
        microbatches = [graphs] * MICROBATCHES
    xs = [torch.randn_like(sample()[0]) for _ in range(MICROBATCHES)]
    output_grad = torch.randn_like(xs[0])
    parameters = [parameter for layer in layers for parameter in layer.parameters()]

    def step() -> None:
        outputs = []
        for graphs, x in zip(microbatches, xs, strict=True):
            x = x.requires_grad_()
            for graph in graphs:
                x = graph(x)
            outputs.append(x)
            if not in_order:
                outputs.pop().backward(output_grad)
        for output in outputs:
            output.backward(output_grad)
        for parameter in (*xs, *parameters):
            parameter.grad = None

    return step


def seconds(step: Callable[[], None]) -> tuple[float, float]:
    """Until the host has issued a step, and until the GPU has done it."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    issued = time.perf_counter()
    torch.cuda.synchronize()
    return issued - began, time.perf_counter() - began


def median(values: list[float]) -> str:
    """The median and its 95 % interval."""
    found, reach = sorted(values), 0.98 * math.sqrt(len(values))
    least, most = (found[round(place)] for place in (len(found) / 2 - reach, len(found) / 2 + reach - 1))
    return f"{statistics.median(found):.4f} [{least:.4f}, {most:.4f}]"


def captured(with_fix: bool, in_order: bool, hidden: int, tokens: int) -> Callable[[], None]:
    te_graph_fixes.deactivate()
    te_graph_fixes.activate(disable=[] if with_fix else [FIX])
    return trained(in_order, hidden, tokens)


def compare(in_order: bool, hidden: int, tokens: int, limit: float) -> str:
    """Times of steps without the fix, with it, with it and without it, captured in this sequence."""
    steps = [captured(with_fix, in_order, hidden, tokens) for with_fix in (False, True, True, False)]
    for _ in range(5):
        for step in steps:
            step()
    gc.collect()
    gc.disable()
    rounds: list[list[tuple[float, float]]] = []
    end = time.monotonic() + limit
    while time.monotonic() < end or len(rounds) < 8:
        first = len(rounds) % len(steps)
        times = {number: seconds(steps[number]) for number in (*range(first, len(steps)), *range(first))}
        rounds.append([times[number] for number in range(len(steps))])
    gc.enable()
    replays = 2 * LAYERS * MICROBATCHES
    added = median([1e6 * (b[0] + c[0] - a[0] - d[0]) / 2 / replays for a, b, c, d in rounds])
    ratio = median([(b[1] + c[1]) / (a[1] + d[1]) for a, b, c, d in rounds])
    same = median([1e6 * (d[0] - a[0]) / replays for a, _, _, d in rounds])
    same_with = median([1e6 * (c[0] - b[0]) / replays for _, b, c, _ in rounds])
    step_ms = 1000 * statistics.median(a[1] for a, *_ in rounds)
    return (
        f"step {step_ms:.2f} ms, {len(rounds)} rounds, ratio {ratio}, microseconds a replay {added}; "
        f"between two captures of one setting: without {same}, with {same_with}"
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # graphs of the other setting go on as they are
    limit = float(sys.argv[1]) if sys.argv[1:] else SECONDS
    print("TE", te_graph_fixes.report().te_version)
    for hidden, tokens in SIZES:
        for in_order in (True, False):
            way = "in an order" if in_order else "without one"
            print(f"hidden {hidden}, {tokens} tokens, {way}: {compare(in_order, hidden, tokens, limit)}", flush=True)
