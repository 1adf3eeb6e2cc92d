"""Parameter grads over three microbatches of one graph, against eager: prints one JSON line for a case.

    python tests/gpu/param_grad_lifetime.py LayerNormLinear fp8-delayed fused
    TE_GRAPH_FIXES=off python tests/gpu/param_grad_lifetime.py LayerNormLinear fp8-delayed fused

Without arguments it runs every case. ``plain`` accumulates every grad in ``.grad``; ``fused`` accumulates those of the
weights in ``main_grad``. ``aliased`` is ``plain`` with ``clone_param_grads_on_return=False``. Runs on the simulator as
well.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock, patch

import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

import te_graph_fixes
from te_graph_fixes.verify.training import make_recipe

HIDDEN = 128
TOKENS = 64
MICROBATCHES = 3
STEPS = 2

RECIPES = ("bf16", "fp8-delayed", "fp8-current")


def build(kind: str, fused: bool) -> torch.nn.Module:
    torch.manual_seed(1)
    options = {"bias": True, "fuse_wgrad_accumulation": fused, "params_dtype": torch.bfloat16, "device": "cuda"}
    if kind == "GroupedLinear":
        module = te.GroupedLinear(2, HIDDEN, HIDDEN, **options)
    elif kind == "LayerNormMLP":
        module = te.LayerNormMLP(HIDDEN, 2 * HIDDEN, **options)
    else:
        module = getattr(te, kind)(HIDDEN, HIDDEN, **options)
    if fused:  # as Megatron's DDP does, for every parameter
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.grad_added_to_main_grad = False
    return module


def train(kind: str, recipe_name: str, mode: str, graphed: bool, hooks: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Every gradient of two steps, and the number of copies made in a microbatch.

    With ``hooks`` a parameter's gradients are those that its hook kept, else what the parameter has accumulated.
    """
    fused = mode == "fused"
    recipe = make_recipe(recipe_name)
    module = build(kind, fused)
    arguments = ([TOKENS // 2] * 2,) if kind == "GroupedLinear" else ()
    torch.manual_seed(2)
    batches = torch.randn(STEPS, MICROBATCHES, TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    output_grads = torch.randn_like(batches)
    run: Callable[..., torch.Tensor] = module
    if graphed:
        plain_forward = module.forward
        module.forward = lambda x: plain_forward(x, *arguments)
        options = {"clone_param_grads_on_return": False} if mode == "aliased" else {}
        sample = torch.randn_like(batches[0, 0]).requires_grad_()
        run = te.make_graphed_callables(module, (sample,), enabled=recipe is not None, recipe=recipe, **options)
    found: dict[str, torch.Tensor] = {}
    in_main_grad = {
        name for name, _ in module.named_parameters() if fused and name.rstrip("0123456789").endswith("weight")
    }
    in_main_grad.discard("layer_norm_weight")
    now = ""

    def keep(name: str) -> Callable[[torch.Tensor], None]:
        return lambda grad: found.__setitem__(f"{name} {now}", grad)

    for name, parameter in module.named_parameters():
        if hooks and name not in in_main_grad:
            parameter.register_hook(keep(name))
    copies = 0
    for step in range(STEPS):
        for parameter in module.parameters():
            parameter.grad = None
            if fused:
                parameter.main_grad.zero_()
        for microbatch in range(MICROBATCHES):
            now = f"{step}.{microbatch}"
            x = batches[step, microbatch].clone().requires_grad_()
            with te.autocast(enabled=True, recipe=recipe) if recipe else nullcontext():
                out = run(x) if graphed else run(x, *arguments)
            clone, cat = Mock(side_effect=torch.Tensor.clone), Mock(side_effect=torch.cat)
            with (
                patch.object(torch.Tensor, "clone", lambda tensor, clone=clone: clone(tensor)),
                patch("torch.cat", cat),
            ):
                out.backward(output_grads[step, microbatch])
            of_grads = [call for call in cat.call_args_list if call.args[0][0].dtype == torch.bfloat16]
            copies = clone.call_count + len(of_grads)  # others are of the amax history
            found[f"dgrad {now}"] = x.grad.clone()
        for name, parameter in module.named_parameters():
            if not hooks:
                found[f"{name} {step}"] = (parameter.main_grad if name in in_main_grad else parameter.grad).clone()
    return found, copies


def errors(kind: str, recipe_name: str, mode: str) -> dict[str, Any]:
    """The largest errors of dgrads, of accumulated grads and of grads kept by hooks, relative to eager."""
    worst: dict[str, Any] = {"dgrads": 0.0}
    for group in ("grads", "kept"):
        wanted, _ = train(kind, recipe_name, mode, graphed=False, hooks=group == "kept")
        found, worst["copies"] = train(kind, recipe_name, mode, graphed=True, hooks=group == "kept")
        for name, value in wanted.items():
            key = "dgrads" if name.startswith("dgrad") else group
            error = float((found[name].double() - value.double()).norm() / value.double().norm())
            worst[key] = max(worst.get(key, 0.0), error if error == error else float("inf"))
    return worst


def main(cases: list[list[str]]) -> None:
    report = te_graph_fixes.report()
    applied = [fix for fix, status in report.fixes.items() if status.status == "applied"]
    for case in cases:
        FP8GlobalStateManager.reset()
        try:
            result = errors(*case)
        except Exception as failure:
            result = {"failed": f"{type(failure).__name__}: {failure}"}
        print(json.dumps({"te": report.te_version, "case": case, "applied": applied, **result}), flush=True)


if __name__ == "__main__":
    kinds = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")
    every = [[kind, recipe, mode] for kind in kinds for recipe in RECIPES for mode in ("plain", "fused")]
    main([sys.argv[1:]] if sys.argv[1:] else every)
