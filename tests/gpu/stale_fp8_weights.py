"""Graphs whose FP8 weights can go stale, against eager: prints one JSON line for a case.

    python tests/gpu/stale_fp8_weights.py Linear fp8-current uncached
    TE_GRAPH_FIXES=off python tests/gpu/stale_fp8_weights.py Linear fp8-current uncached

``uncached``: a capture without cached weights, of a module that carries ``is_first_microbatch``. ``after-cached``: one
of a module that does not, after another module was captured with cached weights. ``not-first``: a capture with cached
weights, replayed after an eager FP8 module in the same autocast, while another graph serves a later microbatch.
``recompute``, ``recompute-after-cached``: as ``uncached`` and ``after-cached``, within ``te.checkpoint`` (which TE 2.10
and 2.11 cannot capture). Eager modules are told of first microbatches where graphs are, and else quantize their weights
for every microbatch, as those graphs have to.
Without arguments it runs every case. Runs on the simulator as well.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

import te_graph_fixes
from te_graph_fixes.verify.training import error, make_recipe

HIDDEN = 128
TOKENS = 64
STEPS = 3
MICROBATCHES = 2
KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")
RECIPES = ("fp8-delayed", "fp8-current")
SETTINGS = ("uncached", "after-cached", "not-first", "recompute", "recompute-after-cached")


class Recomputed(torch.nn.Module):
    """A module whose activations are recomputed in its backward."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return te.checkpoint(self.inner, x)


def build(kind: str, seed: int) -> torch.nn.Module:
    """A module; where it has ``is_first_microbatch`` it passes that on, as Megatron-Core's modules do."""
    torch.manual_seed(seed)
    base = getattr(te, kind)
    options = {"bias": False, "fuse_wgrad_accumulation": True, "params_dtype": torch.bfloat16, "device": "cuda"}

    def forward(self: torch.nn.Module, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        splits = ([x.shape[0] // 2] * 2,) if kind == "GroupedLinear" else ()
        if hasattr(self, "is_first_microbatch"):
            kwargs["is_first_microbatch"] = self.is_first_microbatch
            self.is_first_microbatch = False
        return base.forward(self, x, *splits, **kwargs)

    cls = type(kind, (base,), {"forward": forward})
    shape = (2, HIDDEN, HIDDEN) if kind == "GroupedLinear" else (HIDDEN, 2 * HIDDEN if "MLP" in kind else HIDDEN)
    module = cls(*shape, **options)
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
    return module


def train(kind: str, recipe_name: str, setting: str, graphed: bool) -> list[torch.Tensor]:
    """Outputs, dgrads and wgrads of the module, for every microbatch and step."""
    FP8GlobalStateManager.reset()
    recipe = make_recipe(recipe_name)
    module = inner = build(kind, 1)
    other, eager = build("Linear", 2), build("Linear", 3)
    if setting.startswith("recompute"):
        module = Recomputed(inner)
    marks_first = graphed and setting in ("uncached", "recompute")
    after_cached = setting.endswith("after-cached")
    if marks_first:
        inner.is_first_microbatch = True
    torch.manual_seed(4)
    batches = torch.randn(STEPS, MICROBATCHES, TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    run, run_other = module, other
    if graphed:
        sample = torch.randn_like(batches[0, 0])
        options = {"enabled": True, "recipe": recipe}
        if after_cached or setting == "not-first":
            run_other = te.make_graphed_callables(
                other, (sample.clone().requires_grad_(),), cache_quantized_params=True, **options
            )
        run = te.make_graphed_callables(
            module, (sample.requires_grad_(),), cache_quantized_params=setting == "not-first", **options
        )
    values = []
    for step in range(STEPS):
        if marks_first:
            inner.is_first_microbatch = True
        for parameter in module.parameters():
            parameter.main_grad.zero_()
        for microbatch in range(MICROBATCHES):
            if after_cached or setting == "not-first":  # another graph, ahead of this one in the pipeline
                with te.autocast(enabled=True, recipe=recipe):
                    run_other(batches[step, 0], is_first_microbatch=microbatch == 0)
        for microbatch in range(MICROBATCHES):
            x = batches[step, microbatch].clone().requires_grad_()
            first = {"is_first_microbatch": microbatch == 0} if setting == "not-first" else {}
            with te.autocast(enabled=True, recipe=recipe):
                if setting == "not-first":
                    eager(x.detach())
                out = run(x, **first)
            values.append(out.detach().clone())
            out.backward(torch.ones_like(out))
            values.append(x.grad.clone())
        with torch.no_grad():
            for parameter in module.parameters():
                gradient = parameter.grad if parameter.dim() == 1 else parameter.main_grad
                values.append(gradient.clone())
                parameter.sub_(0.1 * gradient)
                parameter.grad = None
    return values


if __name__ == "__main__":
    every = [[kind, recipe, setting] for setting in SETTINGS for kind in KINDS for recipe in RECIPES]
    report = te_graph_fixes.report()
    applied = [fix for fix, status in report.fixes.items() if status.status == "applied"]
    for case in [sys.argv[1:]] if sys.argv[1:] else every:
        try:
            wanted = train(*case, graphed=False)
            result: dict[str, Any] = {"error": error(train(*case, graphed=True), wanted)}
        except Exception as failure:
            result = {"failed": f"{type(failure).__name__}: {failure}"}
        print(json.dumps({"te": report.te_version, "case": case, "applied": applied, **result}), flush=True)
