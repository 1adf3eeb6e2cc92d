"""The training step of real Megatron-Core: graphs off, TransformerEngine's (TE's) own graphs, and those with the fixes.

    python tests/benchmarks/training_step.py --json training-step.json

A GPT of 4 layers, MoE (8 experts, top 2) and dense, 4 microbatches a step, fused weight gradients, whole layers
captured, one GPU. Each case runs in processes of its own, one for each setting, that take turns. A time is the median
of 20 steps (forwards, backwards and a plain update); memory is the most that torch has reserved. Needs megatron-core.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OFF, ORIGINAL, FIXED = SETTINGS = ("graphs off", "TE's graphs", "graphs, fixed")
MODELS = ("moe", "dense")
RECIPES = ("bf16", "fp8-delayed", "fp8-current")
SHAPES = ((1024, 512), (2048, 2048))  # hidden size, tokens a microbatch
LAYERS = MICROBATCHES = 4
DENSE = {"num_moe_experts": None, "moe_ffn_hidden_size": None, "moe_grouped_gemm": False}
WARMUP, STEPS = 5, 20
LIMIT = 300
"""Seconds for one process."""


def measure(model: str, recipe: str, hidden: int, tokens: int, setting: str) -> dict[str, Any]:
    """Run one setting of one case in this process."""
    import torch

    example = _example()
    example.LAYERS, example.HIDDEN, example.TOKENS, example.MICROBATCHES = LAYERS, hidden, tokens, MICROBATCHES
    example.start()
    gpt, ddp = example.build(recipe, setting != OFF, **(DENSE if model == "dense" else {}))
    times = []
    for step in range(WARMUP + STEPS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        example.step(ddp, example.batches(step))
        example.update(gpt)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    reserved = torch.cuda.max_memory_reserved()
    torch.distributed.destroy_process_group()
    return {"ms": times[WARMUP:], "MiB": reserved / 2**20, "gpu": torch.cuda.get_device_name()}


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("megatron_moe", ROOT / "examples" / "megatron_moe.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _child(case: tuple[str, str, int, int], setting: str) -> dict[str, Any]:
    switch = "on" if setting == FIXED else "off"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, __file__, "--one", json.dumps([*case, setting])],
        env={**os.environ, "TE_GRAPH_FIXES": switch, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    if done.returncode:
        return {"failed": done.stderr.splitlines()[-1:]}
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def table(found: list[dict[str, Any]]) -> str:
    """The cases as Markdown: the times and memory of each setting, and the ratios that matter."""
    rows = [
        ["model, hidden, tokens, recipe", *(f"{setting}, ms" for setting in SETTINGS)],
        ["---"] * 4,
    ]
    rows[0] += ["fixed / off", "fixed / TE's", "MiB: off, TE's, fixed"]
    rows[1] += ["---"] * 3
    for case in found:
        name = "{}, {}, {}, {}".format(*(case[key] for key in ("model", "hidden", "tokens", "recipe")))
        results = [case[setting] for setting in SETTINGS]
        if any("failed" in result for result in results):
            rows.append([name, *(str(result.get("failed", "")) for result in results), "", "", ""])
            continue
        off, original, fixed = (statistics.median(result["ms"]) for result in results)
        memory = ", ".join(f"{result['MiB']:.0f}" for result in results)
        ratios = [f"{fixed / off:.2f}", f"{fixed / original:.3f}"]
        rows.append([name, *(f"{ms:.1f}" for ms in (off, original, fixed)), *ratios, memory])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*json.loads(options.one))))
        return
    found = []
    for model, recipe, (hidden, tokens) in itertools.product(MODELS, options.recipes, SHAPES):
        results = {setting: _child((model, recipe, hidden, tokens), setting) for setting in SETTINGS}
        found.append({"model": model, "recipe": recipe, "hidden": hidden, "tokens": tokens, **results})
        print(table(found[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    print(table(found))


if __name__ == "__main__":
    main()
