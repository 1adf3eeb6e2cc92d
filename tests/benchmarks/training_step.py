"""The training step of real Megatron-Core: graphs off, TransformerEngine's (TE's) own graphs, and those with the fixes.

    python tests/benchmarks/training_step.py --json training-step.json

A GPT of 4 layers, MoE (8 experts, top 2) and dense, 4 microbatches a step, fused weight gradients, whole layers
captured, one GPU. Each setting has a process of its own; they take turns, case by case. A time is the median of the
steps of all rounds (forwards, backwards and a plain update) with the least and the largest median of a round; memory is
the most that torch has reserved. Needs megatron-core.
"""

from __future__ import annotations

import argparse
import gc
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
PORT = 29511


class Worker:
    """A process that measures the cases it is told, with one setting."""

    def __init__(self, setting: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", setting],
            env={
                **os.environ,
                "TE_GRAPH_FIXES": "on" if setting == FIXED else "off",
                "MASTER_PORT": str(PORT + SETTINGS.index(setting)),
                "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, case: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(case), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)  # type: ignore[no-any-return]
        raise RuntimeError(f"a worker ended with status {self._process.wait()} at {case}")


def work(setting: str) -> None:
    """Answer each case on standard input with a line of JSON."""
    spec = importlib.util.spec_from_file_location("megatron_moe", ROOT / "examples" / "megatron_moe.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.LAYERS, example.MICROBATCHES = LAYERS, MICROBATCHES  # type: ignore[attr-defined]
    example.start()
    for line in sys.stdin:
        case = json.loads(line)
        print(json.dumps(measure(example, setting, **case) if case else {}), flush=True)


def measure(example: Any, setting: str, model: str, recipe: str, hidden: int, tokens: int) -> dict[str, Any]:
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    example.HIDDEN, example.TOKENS = hidden, tokens
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
    return {"ms": times[WARMUP:], "MiB": torch.cuda.max_memory_reserved() / 2**20}


def table(found: list[dict[str, Any]]) -> str:
    """The cases as Markdown: the times and memory of each setting, and the ratios that matter."""
    head = [*(f"{setting}, ms" for setting in SETTINGS), "fixed / off", "fixed / TE's", "MiB: off, TE's, fixed"]
    rows = [["model, recipe, hidden, tokens", *head], ["---"] * (1 + len(head))]
    for case in found:
        rounds = [[statistics.median(times) for times in case[setting]["ms"]] for setting in SETTINGS]
        off, original, fixed = medians = [statistics.median(itertools.chain(*case[name]["ms"])) for name in SETTINGS]
        rows.append(
            [
                "{model}, {recipe}, {hidden}, {tokens}".format(**case),
                *(f"{ms:.1f} [{min(each):.1f}, {max(each):.1f}]" for ms, each in zip(medians, rounds, strict=True)),
                f"{fixed / off:.2f}",
                f"{fixed / original:.3f}",
                ", ".join(f"{case[setting]['MiB']:.0f}" for setting in SETTINGS),
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", choices=SETTINGS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    workers = {setting: Worker(setting) for setting in SETTINGS}
    for worker in workers.values():
        worker.ask({})  # answers when it has started
    found = []
    for model, recipe, (hidden, tokens) in itertools.product(MODELS, options.recipes, SHAPES):
        case: dict[str, Any] = {"model": model, "recipe": recipe, "hidden": hidden, "tokens": tokens}
        rounds = [{name: worker.ask(case) for name, worker in workers.items()} for _ in range(options.rounds)]
        results = {
            name: {"ms": [each[name]["ms"] for each in rounds], "MiB": max(each[name]["MiB"] for each in rounds)}
            for name in SETTINGS
        }
        found.append({**case, **results})
        print(table(found[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps(found))
    print(table(found))


if __name__ == "__main__":
    main()
