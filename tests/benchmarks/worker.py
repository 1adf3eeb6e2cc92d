"""One TransformerEngine (TE), measured part by part: reads the name of a part from each line of standard input.

Prints one JSON line for each: measures by name, in the unit that the name ends with. `benchmark.py` runs one of these
for every variant of TE and takes turns between them.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformer_engine.pytorch as te

import te_graph_fixes
from te_graph_fixes.verify.cases import PIPELINED
from te_graph_fixes.verify.driver.program import Program
from te_graph_fixes.verify.driver.setting import make_recipe, use
from te_graph_fixes.verify.driver.training import Training

EXPERTS, HIDDEN, WIDTH, TOKENS = 8, 4096, 14336, 4096
"""The up projection of a Mixtral layer."""


class Experts(te.GroupedLinear):  # type: ignore[misc]
    """Experts that share the tokens evenly and are told of first microbatches, as in Megatron-Core."""

    is_first_microbatch = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        splits = [x.shape[0] // self.num_gemms] * self.num_gemms
        out = super().forward(x, splits, is_first_microbatch=self.is_first_microbatch)
        self.is_first_microbatch = False
        return out  # type: ignore[no-any-return]


def experts(hidden: int, width: int) -> Experts:
    options: dict[str, Any] = {"fuse_wgrad_accumulation": True, "params_dtype": torch.bfloat16, "device": "cuda"}
    module = Experts(EXPERTS, hidden, width, bias=False, **options)
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
    return module


@functools.cache
def small_layer() -> tuple[Experts, torch.Tensor]:
    return experts(256, 256), torch.randn(256, 256, dtype=torch.bfloat16, device="cuda").requires_grad_()


def forward(calls: int = 5, blocks: int = 100) -> dict[str, float]:
    """CPU time of one eager forward in FP8: of the quickest block of calls, the GPU idle at the start of each."""
    module, x = small_layer()
    recipe = make_recipe("delayed")
    times = []
    with te.autocast(enabled=True, recipe=recipe):
        for _ in range(blocks):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                module(x)
            times.append((time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return {"forward_us": 1e6 * min(times)}


@functools.cache
def mixtral_layer() -> tuple[Callable[..., torch.Tensor], torch.Tensor]:
    module = experts(HIDDEN, WIDTH)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda").requires_grad_()
    options = {"enabled": True, "recipe": make_recipe("delayed"), "cache_quantized_params": True}
    return te.make_graphed_callables(module, (x,), **options), x  # replays read x itself: no copy


def replay(rounds: int = 20) -> dict[str, float]:
    """GPU time of a replayed forward, for the first microbatch of a step and for later ones, and of the backward."""
    run, x = mixtral_layer()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {"first": [], "later": [], "backward": []}

    def timed(name: str, what: Callable[[], Any]) -> Any:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        result = what()
        end.record()
        events[name].append((start, end))
        return result

    recipe = make_recipe("delayed")
    for _ in range(rounds):
        for microbatch in range(3):
            with te.autocast(enabled=True, recipe=recipe):  # TE reads is_first_microbatch once for each autocast
                first = not microbatch
                out = timed("first" if first else "later", lambda first=first: run(x, is_first_microbatch=first))
            timed("backward", lambda out=out: out.backward(out))
            x.grad = None
    torch.cuda.synchronize()
    return {
        f"{name}_ms": statistics.median(start.elapsed_time(end) for start, end in pairs)
        for name, pairs in events.items()
    }


class Measured(Training):
    """A training whose captures are measured."""

    time_ms, memory_MiB = 0.0, 0.0

    def capture(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        before, start = torch.cuda.memory_reserved(), time.perf_counter()
        super().capture()
        torch.cuda.synchronize()
        self.time_ms = 1e3 * (time.perf_counter() - start)
        gc.collect()
        torch.cuda.empty_cache()
        self.memory_MiB = (torch.cuda.memory_reserved() - before) / 2**20


def captures() -> dict[str, float]:
    """The time that capturing takes and the memory that it reserves: one FP8 layer of experts, and pipelined orders."""
    found = {}
    order = tuple(entry for entry in PIPELINED if entry % 1 == 0)
    pipelined = {"modules": ("linear",) * 3, "fused": True, "reuse": True}
    for name, program in {
        "one": Program(modules=("grouped_linear",), recipe="delayed", fused=True, weights="cached", microbatches=3),
        "pipelined": Program(order=order, **pipelined),
        "pipelined_wgrads": Program(order=PIPELINED, delay=True, **pipelined),
    }.items():
        use(program)
        training = Measured(graphed=True)
        found[f"capture_{name}_ms"] = training.time_ms
        found[f"memory_{name}_MiB"] = training.memory_MiB
        training.release()
    return found


PARTS: dict[str, Callable[[], dict[str, float]]] = {"forward": forward, "replay": replay, "captures": captures}


def main() -> None:
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to stderr
    report = te_graph_fixes.report()
    applied = [fix_id for fix_id, status in report.fixes.items() if status.status == "applied"]
    print(json.dumps({"te": report.te_version, "gpu": torch.cuda.get_device_name(), "applied": applied}), file=results)
    for line in sys.stdin:
        print(json.dumps(PARTS[line.strip()]()), file=results)


if __name__ == "__main__":
    main()
