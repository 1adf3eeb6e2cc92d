"""The training step of real Megatron-Core: graphs off, TransformerEngine's (TE's) own graphs, and those with the fixes.

    python tests/benchmarks/training_step.py --models moe --recipes fp8-current --json training-step.json

A GPT of three sizes, MoE (8 experts, top 2) or dense, fused weight gradients, whole layers captured, one GPU; a step is
the forwards, the backwards and a plain update. Each case and setting has a process of its own. The settings of a case
take turns of a few steps, in each round in the other direction; a round gives one ratio of the times with the fixes and
without. What is said of a case is the median of its rounds, with an interval that holds the true median in 95 of 100
cases. Memory is the peak that torch has allocated, capture included. Needs megatron-core.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OFF, ORIGINAL, FIXED = SETTINGS = ("graphs off", "TE's graphs", "graphs, fixed")
MODELS = ("moe", "dense")
RECIPES = ("bf16", "fp8-delayed", "fp8-current")
SIZES = ((4, 1024, 512, 4), (4, 2048, 2048, 4), (6, 2048, 2048, 8))
"""Layers, hidden size, tokens of a microbatch, microbatches of a step."""
DENSE = {"num_moe_experts": None, "moe_ffn_hidden_size": None, "moe_grouped_gemm": False}
WARMUP, STEPS = 4, 4
ROUNDS = 12


class Worker:
    """A process that trains one case with one setting."""

    def __init__(self, setting: str, case: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", setting, json.dumps(case)],
            env={
                **os.environ,
                "TE_GRAPH_FIXES": "on" if setting == FIXED else "off",
                "MASTER_PORT": str(free_port()),
                "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def steps(self, count: int) -> dict[str, Any]:
        """Let it do so many steps: their milliseconds, and the peak memory so far. The first call builds the model."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(count, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)  # type: ignore[no-any-return]
        raise RuntimeError(f"a worker ended with status {self._process.wait()}")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def work(setting: str, case: dict[str, Any]) -> None:
    """Do as many steps as each line of standard input says, and answer with a line of JSON."""
    spec = importlib.util.spec_from_file_location("megatron_moe", ROOT / "examples" / "megatron_moe.py")
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.LAYERS, example.HIDDEN, example.TOKENS, example.MICROBATCHES = case["size"]
    example.start()
    import torch

    model: tuple[Any, Any] | None = None
    number = 0
    for line in sys.stdin:
        if model is None:
            dense = DENSE if case["model"] == "dense" else {}
            model = example.build(case["recipe"], setting != OFF, **dense)
        times = []
        for _ in range(int(line)):
            data = [*example.batches(number)]
            number += 1
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            example.step(model[1], iter(data))
            example.update(model[0])
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        print(json.dumps({"ms": times, "MiB": torch.cuda.max_memory_allocated() / 2**20}), flush=True)


def measure(workers: dict[str, Worker], rounds: int) -> dict[str, Any]:
    """Return the milliseconds of all rounds by setting, and the peak memory."""
    for worker in workers.values():
        worker.steps(WARMUP)
    times: dict[str, list[list[float]]] = {setting: [] for setting in workers}
    memory = {}
    for number in range(rounds):
        for setting in [*workers][:: -1 if number % 2 else 1]:
            answer = workers[setting].steps(1 if setting == OFF else STEPS)
            times[setting].append(answer["ms"])
            memory[setting] = answer["MiB"]
    return {"ms": times, "MiB": memory}


def ratios(case: dict[str, Any]) -> list[float]:
    """Time with the fixes / with TE's graphs, one for each round."""
    pairs = zip(case["ms"][FIXED], case["ms"][ORIGINAL], strict=True)
    return [statistics.median(fixed) / statistics.median(original) for fixed, original in pairs]


def interval(values: list[float]) -> tuple[float, float]:
    """The narrowest pair of order statistics that holds the median with a probability of 95 %; of few values, all."""
    values, count = sorted(values), len(values)
    cut = 0
    while 2 * sum(math.comb(count, k) for k in range(cut + 2)) <= 0.05 * 2**count:
        cut += 1
    return values[cut], values[-1 - cut]


def with_interval(values: list[float], digits: int) -> str:
    least, most = interval(values)
    return f"{statistics.median(values):.{digits}f} [{least:.{digits}f}, {most:.{digits}f}]"


def row(case: dict[str, Any]) -> str:
    medians = [[statistics.median(turn) for turn in case["ms"][setting]] for setting in SETTINGS]
    off, fixed = statistics.median(medians[0]), statistics.median(medians[2])
    cells = [
        "{model}, {recipe}, ".format(**case) + ", ".join(map(str, case["size"])),
        *(with_interval(values, 1) for values in medians),
        f"{fixed / off:.2f}",
        with_interval(ratios(case), 3),
        ", ".join(f"{case['MiB'][setting]:.0f}" for setting in SETTINGS),
    ]
    return "| " + " | ".join(cells) + " |"


def head() -> str:
    cells = ["model, recipe, layers, hidden, tokens, microbatches", *(f"{setting}, ms" for setting in SETTINGS)]
    cells += ["fixed / off", "fixed / TE's", "MiB: off, TE's, fixed"]
    return "| " + " | ".join(cells) + " |\n|" + " --- |" * len(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write every sample to this file, after each case")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker[0], json.loads(options.worker[1]))
        return
    cases = [
        {"model": model, "recipe": recipe, "size": size}
        for model, recipe, size in itertools.product(options.models, options.recipes, SIZES)
    ]
    workers = [{setting: Worker(setting, case) for setting in SETTINGS} for case in cases]
    measured: list[dict[str, Any]] = []
    print(head(), flush=True)
    try:
        for case, of_case in zip(cases, workers, strict=True):
            measured.append({**case, **measure(of_case, options.rounds)})
            print(row(measured[-1]), flush=True)
            if options.json:
                options.json.write_text(json.dumps(measured))
            for worker in of_case.values():
                worker.end()
    finally:
        for worker in itertools.chain(*(of_case.values() for of_case in workers)):
            worker.end()
    print(f"\nfixed / TE's, all rounds: {with_interval([*itertools.chain(*map(ratios, measured))], 3)}")


if __name__ == "__main__":
    main()
