"""The memory that graphs of a Megatron-like schedule take, as JSON lines: run it with the fix and without.

    TE_GRAPH_FIXES=backward-dw-order python tests/gpu/order_memory.py
    TE_GRAPH_FIXES=off python tests/gpu/order_memory.py

Interleaved 1F1B with buffer reuse. First of 4 stages, 2 model chunks of 2 layers, 8 microbatches: whole model chunks as
chunks; each layer as a chunk, without wgrads; each layer as a chunk, with delayed wgrads. First of 2 stages, 2 model
chunks of 1 and 2 layers, 4 microbatches: each layer as a chunk, with delayed wgrads, where TransformerEngine hands
static inputs on too early. Last, the least order that needs two buffers for grad outputs. A layer is a `Linear` of
1024 by 1024 on 4096 tokens in bf16, so that an input, and a grad output, is 8 MiB.
"""

from __future__ import annotations

import gc
import json
import os

import torch
import transformer_engine.pytorch as te

import te_graph_fixes
from tests.pipeline_orders import interleaved, layer_wise

TOKENS, HIDDEN = 4096, 1024
MIB = 2**20


def layer(delay: bool) -> torch.nn.Module:
    made = te.Linear(
        HIDDEN,
        HIDDEN,
        bias=False,
        params_dtype=torch.bfloat16,
        fuse_wgrad_accumulation=True,
        delay_wgrad_compute=delay,
    )
    made.weight.main_grad = torch.zeros(HIDDEN, HIDDEN, device="cuda")
    made.weight.grad_added_to_main_grad = False
    return made


def allocated(in_graph_pool: bool) -> float:
    """MiB in use inside graph pools, or outside of them."""
    segments = torch.cuda.memory_snapshot()
    return sum(s["allocated_size"] for s in segments if (s["segment_pool_id"] != (0, 0)) == in_graph_pool) / MIB


def measure(order: list[float], layers: list[int], delay: bool) -> dict[str, float]:
    modules = tuple(layer(delay) for _ in range(sum(layers)))
    gc.collect()
    torch.cuda.empty_cache()
    before = allocated(in_graph_pool=False)
    torch.cuda.reset_peak_memory_stats()
    shape = (TOKENS, HIDDEN)
    samples = [
        (torch.zeros(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True),)
        for _ in range(sum(layers) * order.count(1))
    ]
    sample_kwargs: list[dict[str, torch.Tensor]] = [{} for _ in samples]
    graphs = te.make_graphed_callables(
        modules,
        samples,
        sample_kwargs=sample_kwargs,
        allow_unused_input=True,
        _order=order,
        _num_layers_per_chunk=layers,
        _reuse_graph_input_output_buffers=True,
    )
    del samples
    gc.collect()
    torch.cuda.empty_cache()
    reserved = [s["total_size"] for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] != (0, 0)]
    found = {
        "graphs": len(graphs),
        "static buffers, MiB": allocated(in_graph_pool=False) - before,
        "graph pool in use, MiB": allocated(in_graph_pool=True),
        "graph pool reserved, MiB": sum(reserved) / MIB,
        "peak, MiB": torch.cuda.max_memory_allocated() / MIB,
    }
    for graph in graphs:
        graph.reset()
    return {name: round(value, 1) for name, value in found.items()}


def main() -> None:
    even, uneven = interleaved(4, 0, 2, 8), interleaved(2, 0, 2, 4)
    cases: dict[str, tuple[list[float], list[int], bool]] = {
        "model chunks": (list(even), [2, 2], False),
        "layers": (layer_wise(even, [2, 2]), [1] * 4, False),
        "layers, wgrads": (layer_wise(even, [2, 2], wgrads=True), [1] * 4, True),
        "uneven layers, wgrads": (layer_wise(uneven, [1, 2], wgrads=True), [1] * 3, True),
        "wgrads last": ([1, 2, -2, -1, -2.5, -1.5], [1] * 2, True),
    }
    for name, case in cases.items():
        found = measure(*case)
        version = te_graph_fixes.report().te_version
        print(json.dumps({"te": version, "fixes": os.environ.get("TE_GRAPH_FIXES", "on"), "order": name, **found}))


if __name__ == "__main__":
    main()
