"""The time of a replayed microbatch with all fixes against none, fused wgrad: prints one JSON line for a layer.

    python tests/gpu/replay_speed.py

Both are captured in this process, and their replays take turns: ``ratio`` is the median of the rounds, with the tenth
of them that is least, and most. ``gpu`` is what the GPU takes where the host is ahead of it, as in training of large
layers; ``host`` is what the host takes to start it all. Without bias no gradient needs to be copied; ``delayed``
replays `backward_dw` as well; ``fp8`` is a later microbatch in delayed scaling, whose weights are cached, behind a
small eager module in the same autocast.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformer_engine.pytorch as te

import te_graph_fixes

TOKENS, HIDDEN = 2048, 4096
ROUNDS, REPLAYS = 60, 10
AHEAD = 40_000_000
"""Cycles that the GPU waits (about 20 ms), while the host starts the replays."""
LAYERS = [
    ("Linear", False, False, False),
    ("Linear", False, True, False),
    ("Linear", False, False, True),
    ("GroupedLinear", False, False, False),
    ("GroupedLinear", False, True, False),
    ("LayerNormLinear", False, False, False),
    ("LayerNormLinear", True, False, False),
    ("LayerNormLinear", True, True, False),
    ("LayerNormMLP", True, False, False),
    ("LayerNormMLP", True, False, True),
]
"""Kind, bias, delayed, fp8."""


def captured(kind: str, bias: bool, delayed: bool, fp8: bool) -> Callable[[], None]:
    """What replays one microbatch of a new layer."""
    sizes = (8, HIDDEN, HIDDEN) if kind == "GroupedLinear" else (HIDDEN, HIDDEN)
    options: dict[str, Any] = {"bias": bias, "delay_wgrad_compute": delayed, "fuse_wgrad_accumulation": True}
    module = getattr(te, kind)(*sizes, params_dtype=torch.bfloat16, device="cuda", **options)
    if kind == "GroupedLinear":
        forward = module.forward
        module.forward = lambda x: forward(x, [TOKENS // 8] * 8)
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda").requires_grad_()
    cached = {"enabled": True, "cache_quantized_params": True} if fp8 else {}
    run = te.make_graphed_callables(module, (x,), allow_unused_input=True, **cached)
    in_front = te.Linear(16, 16, params_dtype=torch.bfloat16, device="cuda")
    small, output_grad = torch.randn(16, 16, dtype=torch.bfloat16, device="cuda"), torch.randn_like(x)

    def forward() -> torch.Tensor:
        if not fp8:
            return run(x)
        with te.autocast(enabled=True):
            in_front(small)
            return run(x, is_first_microbatch=False)

    def replay() -> None:
        forward().backward(output_grad)
        if delayed:
            run.backward_dw()
        for parameter in (x, *module.parameters()):
            parameter.grad = None

    return replay


def milliseconds(replay: Callable[[], None]) -> dict[str, float]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD)
    start.record()
    began = time.perf_counter()
    for _ in range(REPLAYS):
        replay()
    host = time.perf_counter() - began
    end.record()
    end.synchronize()
    return {"gpu": start.elapsed_time(end) / REPLAYS, "host": host * 1000 / REPLAYS}


def compare(*layer: Any) -> dict[str, Any]:
    te_graph_fixes.deactivate()
    without = captured(*layer)
    te_graph_fixes.activate()
    with_fixes = captured(*layer)
    pairs = []
    for turn in range(ROUNDS + 5):
        both = [without, with_fixes] if turn % 2 else [with_fixes, without]
        times = {replay: milliseconds(replay) for replay in both}
        if turn >= 5:  # the first are for warming up
            pairs.append((times[with_fixes], times[without]))
    result = {}
    for where in ("gpu", "host"):
        ratios = sorted(on[where] / off[where] for on, off in pairs)
        tenth = ROUNDS // 10
        result[where] = {
            "without_ms": round(statistics.median(off[where] for _, off in pairs), 4),
            "with_ms": round(statistics.median(on[where] for on, _ in pairs), 4),
            "ratio": round(statistics.median(ratios), 4),
            "least": round(ratios[tenth], 4),
            "most": round(ratios[-tenth - 1], 4),
        }
    return result


if __name__ == "__main__":
    for layer in LAYERS:
        named = dict(zip(("layer", "bias", "delayed", "fp8"), layer, strict=True))
        print(json.dumps({"te": te_graph_fixes.report().te_version, **named, **compare(*layer)}), flush=True)
