"""Megatron-style training, graph replay against eager, on a GPU or on the simulator: prints one JSON line for a case.

    python tests/simulator/side_by_side.py GroupedLinear fp8-delayed
    python -m tests.simulator tests/simulator/side_by_side.py GroupedLinear fp8-delayed

This is the case that ``docs/results/core.md`` gives for an H200. It imports nothing of the fixes: what it prints is the
installed TransformerEngine (TE) as it is.

The modules carry ``is_first_microbatch`` as Megatron-Core's do: they pass it to TE and set it to False after their
forward; it is set to True before a step. One graph serves all microbatches of a step. The wgrad is fused into
``main_grad`` (float32, zeroed before a step), and an optimizer step changes the weights in between.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

STEPS = 3
MICROBATCHES = 3
HIDDEN = 128
TOKENS = 64
EXPERTS = 2
LEARNING_RATE = 0.1

RECIPES: dict[str, Callable[[], Any] | None] = {
    "bf16": None,
    "fp8-delayed": lambda: recipes.DelayedScaling(),
    "fp8-current": lambda: recipes.Float8CurrentScaling(),
}


class Linear(te.Linear):  # type: ignore[misc]
    """`te.Linear` as Megatron-Core calls it."""

    is_first_microbatch = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x, is_first_microbatch=self.is_first_microbatch)
        self.is_first_microbatch = False
        return out


class GroupedLinear(te.GroupedLinear):  # type: ignore[misc]
    """`te.GroupedLinear` as Megatron-Core calls it, with the tokens split evenly over the experts."""

    is_first_microbatch = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        splits = [x.shape[0] // self.num_gemms] * self.num_gemms
        out = super().forward(x, splits, is_first_microbatch=self.is_first_microbatch)
        self.is_first_microbatch = False
        return out


@dataclass
class Step:
    """What one step computed: an output and a dgrad for each microbatch, and every ``main_grad`` at its end."""

    outputs: list[torch.Tensor]
    dgrads: list[torch.Tensor]
    wgrads: list[torch.Tensor]


def _module(kind: str) -> torch.nn.Module:
    options = {"bias": False, "fuse_wgrad_accumulation": True, "params_dtype": torch.bfloat16, "device": "cuda"}
    torch.manual_seed(1)
    if kind == "Linear":
        return Linear(HIDDEN, HIDDEN, **options)
    return GroupedLinear(EXPERTS, HIDDEN, HIDDEN, **options)


def train(kind: str, recipe_name: str, graphed: bool) -> Iterator[Step]:
    """Train ``kind`` (``Linear`` or ``GroupedLinear``) eagerly or through a graph, and give what each step computed."""
    make_recipe = RECIPES[recipe_name]
    recipe = make_recipe() if make_recipe else None
    module = _module(kind)
    parameters = list(module.parameters())
    for parameter in parameters:
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
        parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    torch.manual_seed(2)
    batches = torch.randn(STEPS, MICROBATCHES, TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    output_grads = torch.randn_like(batches)

    run: Callable[..., torch.Tensor] = module
    if graphed:
        sample = torch.randn_like(batches[0, 0]).requires_grad_()
        run = te.make_graphed_callables(
            module, (sample,), enabled=recipe is not None, recipe=recipe, cache_quantized_params=recipe is not None
        )
    for step in range(STEPS):
        done = Step([], [], [])
        module.is_first_microbatch = True  # type: ignore[assignment]
        for parameter in parameters:
            parameter.main_grad.zero_()  # type: ignore[union-attr]
        for microbatch in range(MICROBATCHES):
            x = batches[step, microbatch].clone().requires_grad_()
            with te.autocast(enabled=True, recipe=recipe) if recipe else nullcontext():
                out = run(x, is_first_microbatch=microbatch == 0) if graphed else run(x)
            done.outputs.append(out.detach().clone())
            out.backward(output_grads[step, microbatch])
            assert x.grad is not None
            done.dgrads.append(x.grad.clone())
        torch.cuda.synchronize()
        with torch.no_grad():
            for parameter in parameters:
                done.wgrads.append(parameter.main_grad.clone())  # type: ignore[operator]
                parameter.sub_(LEARNING_RATE * parameter.main_grad)  # type: ignore[operator]
        yield done


def error(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The norm of the difference over the norm of what is wanted; 0.0 is bit for bit."""
    difference = sum(float((a.double() - b.double()).norm()) ** 2 for a, b in zip(found, wanted, strict=True))
    return float((difference / sum(float(b.double().norm()) ** 2 for b in wanted)) ** 0.5)


def measure(kind: str, recipe_name: str) -> dict[str, list[float]]:
    """For each step the errors of outputs, dgrads and wgrads, and the norm of the wgrads relative to eager."""
    found: dict[str, list[float]] = {"outputs": [], "dgrads": [], "wgrads": [], "wgrad_norm": []}
    eager = list(train(kind, recipe_name, graphed=False))
    for graphed, wanted in zip(train(kind, recipe_name, graphed=True), eager, strict=True):
        for name in ("outputs", "dgrads", "wgrads"):
            found[name].append(error(getattr(graphed, name), getattr(wanted, name)))
        norms = [float(torch.cat([wgrad.flatten() for wgrad in step.wgrads]).norm()) for step in (graphed, wanted)]
        found["wgrad_norm"].append(norms[0] / norms[1])
    return found


if __name__ == "__main__":
    print(json.dumps({"case": sys.argv[1:], **measure(*sys.argv[1:])}))
