"""What ``replay-contract`` costs: prints one line for each way of training.

    python tests/gpu/contract_cost.py [SECONDS FOR EACH]

Four transformer layers with fused wgrads, four microbatches, in an order and without one; small, as a step that waits
for the host, and large. Both settings, all fixes and all but this one, are captured in this process, and their steps
take turns. The microseconds are what the fix adds on the host to a replay, the ratio is the time of a step with it over
that without, until the GPU is done; each is the median of the pairs, with its 95 % interval.
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


def compare(in_order: bool, hidden: int, tokens: int, limit: float) -> str:
    end = time.monotonic() + limit
    te_graph_fixes.deactivate()
    te_graph_fixes.activate(disable=[FIX])
    without = trained(in_order, hidden, tokens)
    te_graph_fixes.deactivate()
    te_graph_fixes.activate()
    with_fix = trained(in_order, hidden, tokens)
    for _ in range(5):
        without(), with_fix()
    gc.collect()
    gc.disable()
    pairs = []
    while time.monotonic() < end or len(pairs) < 8:
        both = [without, with_fix] if len(pairs) % 2 else [with_fix, without]
        times = {step: seconds(step) for step in both}
        pairs.append((times[with_fix], times[without]))
    gc.enable()
    replays = 2 * LAYERS * MICROBATCHES
    added = median([1e6 * (on[0] - off[0]) / replays for on, off in pairs])
    ratio = median([on[1] / off[1] for on, off in pairs])
    step_ms = 1000 * statistics.median(off[1] for _, off in pairs)
    return f"step {step_ms:.2f} ms, microseconds a replay {added}, ratio {ratio}, {len(pairs)} pairs"


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # graphs of the other setting go on as they are
    limit = float(sys.argv[1]) if sys.argv[1:] else SECONDS
    print("TE", te_graph_fixes.report().te_version)
    for hidden, tokens in SIZES:
        for in_order in (True, False):
            way = "in an order" if in_order else "without one"
            print(f"hidden {hidden}, {tokens} tokens, {way}: {compare(in_order, hidden, tokens, limit)}", flush=True)
