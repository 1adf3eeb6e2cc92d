"""Train through graphs captured in an order, and eagerly without delayed wgrads, and compare every value."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_graph_fixes.verify.training import make_recipe

STEPS = 2
TOKENS = 32
HIDDEN = 64
EXPERTS = 2
LEARNING_RATE = 0.1


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
    layers: int = 1,
) -> Values:
    """Run ``order`` for some steps. ``graphed``: through graphs with delayed wgrads; else eagerly without delay.

    A wgrad for which the order has no entry is replayed right after its dgrad. ``shared``: static inputs are shared by
    the caller. Each of the ``layers`` of a chunk has inputs of its own.
    """
    recipe = make_recipe(recipe_name)
    FP8GlobalStateManager.reset()
    chunks = int(max(order))
    microbatches = sum(entry == 1 for entry in order)
    modules = tuple(module(kind, seed, delay=graphed) for seed in range(chunks * layers))
    parameters = [parameter for made in modules for parameter in made.parameters()]
    torch.manual_seed(100)
    shape = (STEPS, chunks * microbatches * layers, TOKENS, HIDDEN)
    inputs = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    output_grads = torch.randn_like(inputs)

    chunk_modules = [modules[start : start + layers] for start in range(0, len(modules), layers)]
    runs: list[Any] = [made for chunk in chunk_modules for _ in range(microbatches) for made in chunk]
    owners = list(runs)
    if graphed:
        samples: list[Any] = [(torch.randn_like(inputs[0, 0]).requires_grad_(),) for _ in runs]
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
                _num_layers_per_chunk=[layers] * chunks,
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
            first = ((abs(ceil(entry)) - 1) * microbatches + done.get(entry, 0)) * layers
            done[entry] = done.get(entry, 0) + 1
            if entry > 0:
                for index in range(first, first + layers):
                    x = inputs[step, index].clone().requires_grad_()
                    with te.autocast(enabled=True, recipe=recipe) if recipe else nullcontext():
                        leaves[index] = x, runs[index](x)
                    values.outputs.append(leaves[index][1].detach().clone())
                continue
            for index in reversed(range(first, first + layers)):
                if entry == ceil(entry):
                    x, out = leaves.pop(index)
                    out.backward(output_grads[step, index])
                    assert x.grad is not None
                    values.dgrads.append(x.grad.clone())
                    for parameter in owners[index].parameters():
                        if parameter.grad is not None:  # of a norm; of a weight with fused wgrad it is a dummy
                            if parameter.dim() == 1:
                                sums[parameter] += parameter.grad
                            parameter.grad = None
                if graphed and (entry != ceil(entry) or entry - 0.5 not in order):
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


def inference_error(kind: str, order: Sequence[float]) -> float:
    """The error of outputs where modules in evaluation mode are captured in an order without wgrads."""
    modules = tuple(module(kind, seed, delay=False).eval() for seed in range(int(max(order))))
    runs = [made for made in modules for _ in range(sum(entry == 1 for entry in order))]
    inputs = torch.randn(len(runs), TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        graphs = te.make_graphed_callables(
            modules,
            [(torch.zeros_like(x),) for x in inputs],
            sample_kwargs=[{} for _ in runs],
            _order=list(order),
            _num_layers_per_chunk=[1] * len(modules),
        )
        found = [graph(x).clone() for graph, x in zip(graphs, inputs, strict=True)]
        return error(found, [run(x) for run, x in zip(runs, inputs, strict=True)])
