"""What captures hold on to: memory after a capture, after ``reset()`` and after a second capture, as JSON lines.

    python tests/gpu/capture_memory.py                          # every case, each in a process of its own
    python tests/gpu/capture_memory.py fp8-delayed params 11    # one: a recipe, FP8 parameters or not, warmups

Run it with the fixes and with ``TE_GRAPH_FIXES=off``, on each TransformerEngine: what is held longer shows in what is
allocated after a capture, and what ``reset()`` does not give back in ``left``. First of 4 stages, 4 model chunks of one
layer, 8 microbatches, buffers reused; `LayerNormMLP` of 1024 by 4096 on 2048 tokens (a sixteenth of all on the
simulator). ``tensors`` counts those that Python can reach.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.pipeline_orders import interleaved

RECIPES = ("bf16", "fp8-delayed", "fp8-current", "mxfp8", "nvfp4")
KINDS, WARMUPS = ("params", "plain"), ("1", "3", "11")
CHUNKS, MICROBATCHES = 4, 8


def measure(recipe_name: str, kind: str, warmups: int) -> dict[str, Any]:
    import torch
    import transformer_engine.pytorch as te

    import te_graph_fixes
    from te_graph_fixes.verify.training import Skipped, make_recipe

    scale = 16 if not hasattr(torch.cuda, "memory_snapshot") or "tests.simulator" in sys.modules else 1
    hidden, tokens = 1024 // scale, 2048 // scale
    found: dict[str, Any] = {
        "te": te_graph_fixes.report().te_version,
        "fixes": os.environ.get("TE_GRAPH_FIXES", "on"),
        "case": f"{recipe_name} {kind} {warmups}",
    }
    try:
        recipe = make_recipe(recipe_name)
    except Skipped as why:
        return {**found, "skipped": str(why)}
    gpu = {"dtype": torch.bfloat16, "device": "cuda"}

    def now(name: str) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        found[name] = {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "tensors": sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()),
        }
        if scale == 1:
            found[name]["peak"] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()

    with te.quantized_model_init(enabled=kind == "params" and recipe is not None, recipe=recipe):
        layers = [
            te.LayerNormMLP(hidden, 4 * hidden, params_dtype=torch.bfloat16, device="cuda") for _ in range(CHUNKS)
        ]
    now("before")
    for capture in ("first", "second"):
        samples = [(torch.zeros(tokens, hidden, requires_grad=True, **gpu),) for _ in range(CHUNKS * MICROBATCHES)]
        graphs = te.make_graphed_callables(
            tuple(layers),
            samples,
            num_warmup_iters=warmups,
            allow_unused_input=True,
            enabled=recipe is not None,
            recipe=recipe,
            cache_quantized_params=recipe is not None,
            _order=interleaved(4, 0, CHUNKS, MICROBATCHES),
            _num_layers_per_chunk=[1] * CHUNKS,
            _reuse_graph_input_output_buffers=True,
        )
        del samples
        now(f"{capture} capture")
        for graph in graphs:
            graph.reset()
        del graphs, graph
        now(f"left by the {capture}")
    return found


def main(arguments: list[str]) -> None:
    if arguments:
        recipe, kind, warmups = arguments
        print(json.dumps(measure(recipe, kind, int(warmups))), flush=True)
        return
    for case in itertools.product(RECIPES, KINDS, WARMUPS):
        if case[:2] != ("bf16", "params"):
            subprocess.run([sys.executable, __file__, *case], check=False)


if __name__ == "__main__":
    main(sys.argv[1:])
