"""What a failed capture leaves behind: prints one JSON line for each place of failure.

    python tests/gpu/failed_capture_state.py capture-forward
    TE_GRAPH_FIXES=off python tests/gpu/failed_capture_state.py capture-forward

``changed`` lists what is not as it was before, ``seen`` the exception that the caller gets, ``eager`` the error of two
eager steps after the failure against the same steps without any capture, ``next`` the error of a graph captured after
that. Without arguments every place is tried, each in a process of its own on a GPU. Runs on the simulator as well.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch import graph
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

import te_graph_fixes
from te_graph_fixes.verify.driver.comparison import error

HIDDEN = 64
TOKENS = 32
WARMUP = 2
PLACES = (
    "warmup-forward",
    "warmup-backward",
    "capture-forward",
    "capture-backward",
    "capture-wgrad",
    "spoiled-forward",
    "spoiled-backward",
    "not-a-module",
    "enabled",
)


class PlannedError(Exception):
    """The failure that the case makes."""


class Trap(torch.autograd.Function):
    """Identity; does ``act`` in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, act: Callable[[str, torch.Tensor], None]) -> torch.Tensor:
        ctx.act = act
        act("forward", x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.act("backward", grad)
        return grad, None


class Layer(te.LayerNormLinear):
    """A layer as Megatron-Core has it, that fails where it is told to."""

    is_first_microbatch = True
    fails = ""
    calls: dict[str, int]

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        x = x + 0.1 * torch.rand_like(x) if RANDOM else x
        out = super().forward(Trap.apply(x, self.act), **kwargs)
        self.is_first_microbatch = False
        return out

    def backward_dw(self) -> None:
        self.act("wgrad", self.weight)
        super().backward_dw()

    def act(self, what: str, tensor: torch.Tensor) -> None:
        self.calls[what] = self.calls.get(what, 0) + 1
        place, _, wanted = self.fails.partition("-")
        if what == wanted and self.calls[what] == (1 if place == "warmup" else WARMUP + 1):
            if place == "spoiled":
                tensor.sum().item()
            raise PlannedError(self.fails)


RANDOM = hasattr(torch._C, "_cuda_getDeviceCount")  # the simulator captures no random numbers


def build(delay: bool) -> Layer:
    torch.manual_seed(1)
    FP8GlobalStateManager.reset()
    layer = Layer(
        HIDDEN,
        HIDDEN,
        bias=False,
        fuse_wgrad_accumulation=delay,
        delay_wgrad_compute=delay,
        params_dtype=torch.bfloat16,
        device="cuda",
    )
    layer.calls = {}
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
    return layer


def train(layer: Layer, run: Callable[..., torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Two steps of one microbatch: outputs and gradients."""
    recipe = DelayedScaling()
    delay = layer.wgrad_store.context is not None
    torch.manual_seed(seed)
    values = []
    for _ in range(2):
        for parameter in layer.parameters():
            parameter.grad = None
            parameter.main_grad.zero_()
        x = (seed * torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")).requires_grad_()
        with te.autocast(enabled=True, recipe=recipe):
            out = run(x)
        out.backward(seed * torch.randn_like(out))
        if delay:
            (run if hasattr(run, "backward_dw") else layer).backward_dw()
        values += [out.detach().clone(), x.grad.clone(), layer.layer_norm_weight.grad.clone()]
        values.append((layer.weight.main_grad if delay else layer.weight.grad).clone())
    return values


def capture(layer: Layer, sample: torch.Tensor, place: str = "") -> Callable[..., torch.Tensor]:
    modules: Any = (layer,)
    samples = ((sample,),)
    if place == "not-a-module":
        modules, samples = (layer, lambda x: x), ((sample,), (sample,))
    return te.make_graphed_callables(
        modules,
        samples,
        num_warmup_iters=WARMUP,
        allow_unused_input=True,
        enabled=(True, True) if place == "enabled" else True,
        recipe=None if place == "not-a-module" else DelayedScaling(),
    )[0]


def state(layer: Layer, sample: torch.Tensor) -> dict[str, Any]:
    """All that a capture touches."""
    store = layer.wgrad_store.context
    return {
        "garbage collection": gc.isenabled(),
        "capturing flag": graph.is_graph_capturing(),
        "FP8 capturing flag": FP8GlobalStateManager.fp8_graph_capturing(),
        "FP8 enabled": FP8GlobalStateManager.is_fp8_enabled(),
        "call": Layer.__call__.__code__,
        "hooks": sum(len(module._forward_hooks) for module in layer.modules()),
        "stream": torch.cuda.current_stream(),
        "grads": [id(tensor.grad) for tensor in (sample, *layer.parameters())],
        "first microbatch": layer.is_first_microbatch,
        "delayed wgrads": [] if store is None else [id(entry) for entry in store.queue],
        "random numbers": torch.cuda.get_rng_state().tolist() if RANDOM else None,
        "FP8 scales": [
            tensor.tolist()
            for key in ("scaling_fwd", "scaling_bwd")
            for tensor in (layer.fp8_meta[key].scale, layer.fp8_meta[key].amax_history)
        ],
    }


def check(place: str) -> dict[str, Any]:
    delay = place.endswith("wgrad")
    untouched = build(delay)
    first, wanted = (train(untouched, untouched, seed) for seed in (2, 3))
    layer = build(delay)
    assert all(map(torch.equal, train(layer, layer, seed=2), first))
    layer.is_first_microbatch = True
    layer.calls = {}
    sample = (100 * torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")).requires_grad_()
    sample.grad = torch.ones_like(sample)
    before = state(layer, sample)
    layer.fails = place
    found: dict[str, Any] = {"seen": None}
    try:
        capture(layer, sample, place)
    except BaseException as failure:
        found["seen"] = f"{type(failure).__name__}: {failure}".splitlines()[0]
    layer.fails = ""
    after = state(layer, sample)
    found["changed"] = [name for name in before if before[name] != after[name]]
    try:
        found["eager"] = error(train(layer, layer, seed=3), wanted)
    except Exception as failure:
        found["eager"] = f"{type(failure).__name__}: {failure}".splitlines()[0]
    try:
        untouched = build(delay)
        again = build(delay)
        found["next"] = error(train(again, capture(again, sample), seed=4), train(untouched, untouched, seed=4))
    except Exception as failure:
        found["next"] = f"{type(failure).__name__}: {failure}".splitlines()[0]
    return found


if __name__ == "__main__":
    if sys.argv[1:]:
        report = te_graph_fixes.report()
        applied = [fix for fix, status in report.fixes.items() if status.status == "applied"]
        for place in sys.argv[1:]:
            print(json.dumps({"te": report.te_version, "place": place, "applied": applied, **check(place)}), flush=True)
    else:
        started = [subprocess.Popen([sys.executable, os.path.abspath(__file__), place]) for place in PLACES]
        sys.exit(max(process.wait() for process in started))
