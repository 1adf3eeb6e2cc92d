"""Train through graphs captured in an order, and eagerly without delayed wgrads, and compare every value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

STEPS = 2
TOKENS = 32
HIDDEN = 64
EXPERTS = 2
LEARNING_RATE = 0.1

RECIPES: dict[str, Callable[[], Any] | None] = {
    "bf16": None,
    "fp8-delayed": lambda: recipes.DelayedScaling(),
    "fp8-current": lambda: recipes.Float8CurrentScaling(),
}


class GroupedLinear(te.GroupedLinear):
    """`te.GroupedLinear` with the tokens split evenly over the experts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, [x.shape[0] // self.num_gemms] * self.num_gemms)


def module(kind: str, seed: int, delay: bool) -> torch.nn.Module:
    """A module with its wgrad fused into ``main_grad``, delayed or not; equal seeds give equal weights."""
    options = {
        "bias": False,
        "fuse_wgrad_accumulation": True,
        "delay_wgrad_compute": delay,
        "params_dtype": torch.bfloat16,
        "device": "cuda",
    }
    torch.manual_seed(seed)
    if kind == "GroupedLinear":
        made = GroupedLinear(EXPERTS, HIDDEN, HIDDEN, **options)
    else:
        made = getattr(te, kind)(HIDDEN, HIDDEN, **options)
    for parameter in made.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
    return made


@dataclass
class Values:
    """All that training computed."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    dgrads: list[torch.Tensor] = field(default_factory=list)
    wgrads: list[torch.Tensor] = field(default_factory=list)


def shared_samples(order: Sequence[float], samples: list[Any], microbatches: int) -> None:
    """Share ``samples`` as Megatron-Core does: a forward takes over the oldest sample whose dgrad has run."""
    done: dict[float, int] = {}
    free: list[int] = []
    for entry in order:
        index = (abs(ceil(entry)) - 1) * microbatches + done.get(entry, 0)
        done[entry] = done.get(entry, 0) + 1
        if entry > 0 and free:
            samples[index] = samples[free.pop(0)]
        elif entry < 0 and entry == ceil(entry):
            free.append(index)


def train(
    kind: str,
    recipe_name: str,
    order: Sequence[float],
    graphed: bool,
    reuse: bool = False,
    shared: bool = False,
) -> Values:
    """Run ``order`` for some steps. ``graphed``: through graphs with delayed wgrads; else eagerly without delay.

    A wgrad for which the order has no entry is replayed right after its dgrad. ``shared``: static inputs are shared by
    the caller.
    """
    make_recipe = RECIPES[recipe_name]
    recipe = make_recipe() if make_recipe else None
    FP8GlobalStateManager.reset()
    chunks = int(max(order))
    microbatches = sum(entry == 1 for entry in order)
    modules = tuple(module(kind, seed, delay=graphed) for seed in range(chunks))
    parameters = [parameter for made in modules for parameter in made.parameters()]
    torch.manual_seed(100)
    shape = (STEPS, chunks, microbatches, TOKENS, HIDDEN)
    inputs = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    output_grads = torch.randn_like(inputs)

    runs: list[Any] = [made for made in modules for _ in range(microbatches)]
    if graphed:
        samples: list[Any] = [(torch.randn_like(inputs[0, 0, 0]).requires_grad_(),) for _ in runs]
        if shared:
            shared_samples(order, samples, microbatches)
        runs = list(
            te.make_graphed_callables(
                modules,
                samples,
                sample_kwargs=[{} for _ in runs],
                allow_unused_input=True,
                enabled=recipe is not None,
                recipe=recipe,
                _order=list(order),
                _num_layers_per_chunk=[1] * chunks,
                _reuse_graph_input_output_buffers=reuse,
            )
        )
    values = Values()
    for step in range(STEPS):
        sums = {parameter: torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters}
        for parameter in parameters:
            parameter.main_grad.zero_()
        done: dict[float, int] = {}
        leaves: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for entry in order:
            chunk, microbatch = abs(ceil(entry)) - 1, done.get(entry, 0)
            done[entry] = microbatch + 1
            index = chunk * microbatches + microbatch
            if entry > 0:
                x = inputs[step, chunk, microbatch].clone().requires_grad_()
                with te.autocast(enabled=True, recipe=recipe) if recipe else nullcontext():
                    leaves[index] = x, runs[index](x)
                values.outputs.append(leaves[index][1].detach().clone())
            elif entry == ceil(entry):
                x, out = leaves.pop(index)
                out.backward(output_grads[step, chunk, microbatch])
                assert x.grad is not None
                values.dgrads.append(x.grad.clone())
                for parameter in modules[chunk].parameters():
                    if parameter.grad is not None:  # of a norm; of a weight with fused wgrad it is a dummy
                        if parameter.dim() == 1:
                            sums[parameter] += parameter.grad
                        parameter.grad = None
                if graphed and entry - 0.5 not in order:
                    runs[index].backward_dw()
            elif graphed:
                runs[index].backward_dw()
        torch.cuda.synchronize()
        with torch.no_grad():
            for parameter in parameters:
                total = sums[parameter] + parameter.main_grad
                values.wgrads.append(total)
                parameter.sub_(LEARNING_RATE * total)
    return values


def error(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The norm of the difference over the norm of what is wanted; 0.0 is bit for bit."""
    if all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)):
        return 0.0
    difference = sum(float((a.double() - b.double()).norm()) ** 2 for a, b in zip(found, wanted, strict=True))
    return float((difference / sum(float(b.double().norm()) ** 2 for b in wanted)) ** 0.5)


def compare(found: Values, wanted: Values) -> dict[str, float]:
    """The errors of outputs, dgrads and wgrads."""
    return {name: error(getattr(found, name), getattr(wanted, name)) for name in ("outputs", "dgrads", "wgrads")}


def errors(kind: str, recipe_name: str, order: Sequence[float], **options: Any) -> dict[str, float]:
    """The errors of graph replay in ``order`` against eager."""
    eager = train(kind, recipe_name, order, graphed=False)
    return compare(train(kind, recipe_name, order, graphed=True, **options), eager)
