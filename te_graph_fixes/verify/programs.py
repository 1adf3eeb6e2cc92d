"""Programs that run several modules, graphed and eager ones, in their autocasts: replay against eager.

A program makes its modules, captures some of them if it is asked to, and gives what runs a microbatch. Outputs, dgrads,
wgrads and the scales of delayed scaling are compared, over several optimizer steps with inputs that grow.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from .training import HIDDEN, TOKENS, error, make_recipe, random, require_recomputation

STEPS, MICROBATCHES, LEARNING_RATE = 3, 2, 0.1
OPTIONS: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda"}

Run = Callable[[torch.Tensor, bool], torch.Tensor]
"""Runs a microbatch; the flag says whether it is the first one of its step."""
Program = Callable[[Any, bool], "tuple[Run, Iterable[torch.nn.Module]]"]
"""Makes the modules of a program for a recipe, captures them if the flag says so."""

PROGRAMS: dict[str, Program] = {}
"""By name. Tests add their own."""


def program(function: Program) -> Program:
    """Enter a function into the `PROGRAMS`."""
    PROGRAMS[function.__name__.replace("_", "-")] = function
    return function


def linear() -> Any:
    """A projection."""
    return te.Linear(HIDDEN, HIDDEN, **OPTIONS)


def operation() -> Any:
    """A projection of `te.ops`."""
    return te.ops.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.bfloat16, device="cuda")


class Block(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """Two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(torch.relu(self.first(x)))


def capture(*modules: torch.nn.Module, recipe: Any, grad: bool = True, **options: Any) -> Any:
    """Graph the modules, which are run in this order, for inputs that need a gradient, or do not."""
    samples = tuple((random().requires_grad_(grad),) for _ in modules)
    return te.make_graphed_callables(modules, samples, **{"enabled": recipe is not None, "recipe": recipe, **options})


def autocast(recipe: Any) -> Any:
    """The autocast of a recipe, none for None."""
    return te.autocast(enabled=True, recipe=recipe) if recipe else nullcontext()


@program
def nested_modules(recipe: Any, graphed: bool) -> Any:
    """A `Sequential` inside a captured `Sequential`, and a captured projection next to a layer that holds some."""
    nested, block, last = torch.nn.Sequential(torch.nn.Sequential(linear()), linear()), Block(), linear()
    if graphed:
        capture(nested, block, last, recipe=recipe)

    def run(x: torch.Tensor, first: bool) -> Any:
        with autocast(recipe):
            return last(block(nested(x)))

    return run, (nested, block, last)


@program
def nested_operations(recipe: Any, graphed: bool) -> Any:
    """A `te.ops.Sequential` inside a captured one."""
    nested = te.ops.Sequential(te.ops.Sequential(operation()), operation())
    if graphed:
        capture(nested, recipe=recipe)

    def run(x: torch.Tensor, first: bool) -> Any:
        with autocast(recipe):
            return nested(x)

    return run, (nested,)


@program
def experts_after_steps(recipe: Any, graphed: bool) -> Any:
    """Experts that are captured after some steps; what runs first in the first autocast of a step has no backward."""

    class Experts(te.GroupedLinear):  # type: ignore[misc,unused-ignore]
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x, [TOKENS // 2] * 2)

    head, experts = linear(), Experts(2, HIDDEN, HIDDEN, **OPTIONS)

    def run(x: torch.Tensor, first: bool) -> Any:
        with autocast(recipe):
            if first:
                head(x.detach())
            return experts(x)

    run(random(), False).backward(random())
    for parameter in experts.parameters():
        parameter.grad = None
    if graphed:
        capture(experts, recipe=recipe)
    return run, (experts,)


@program
def frozen_first(recipe: Any, graphed: bool) -> Any:
    """A frozen graph runs first in the autocast, with FP8 weights that are cached."""
    frozen, trained = linear().requires_grad_(False).eval(), linear()
    if graphed:
        capture(frozen, recipe=recipe, grad=False, cache_quantized_params=True)
        capture(trained, recipe=recipe, cache_quantized_params=True)

    def run(x: torch.Tensor, first: bool) -> Any:
        with autocast(recipe):
            hidden = frozen(x.detach(), is_first_microbatch=first)
            return trained(hidden, is_first_microbatch=first) + x

    return run, (frozen, trained)


@program
def self_distillation(recipe: Any, graphed: bool) -> Any:
    """A graph runs without gradients first, and with them then, in one autocast."""
    block = Block()
    if graphed:
        capture(block, recipe=recipe)

    def run(x: torch.Tensor, first: bool) -> Any:
        with autocast(recipe):
            with torch.no_grad():
                target = block(x / 2).clone()
            return block(x) - target

    return run, (block,)


@program
def plain_torch_first(recipe: Any, graphed: bool) -> Any:
    """A graph without TE modules, whose gradients nobody wants, runs first in the autocast."""
    plain, trained = torch.nn.Linear(HIDDEN, HIDDEN, dtype=torch.bfloat16, device="cuda"), linear()
    if graphed:
        capture(plain, recipe=None)
        capture(trained, recipe=recipe)

    def run(x: torch.Tensor, first: bool) -> Any:
        with autocast(recipe):
            return plain(x).detach() + trained(x)

    return run, (trained,)


@program
def forward_method(recipe: Any, graphed: bool) -> Any:
    """A module, captured with an order, calls ``forward`` of projections; another one is an operation by itself."""

    class Calls(Block):
        def forward(self, x: torch.Tensor) -> Any:
            return self.second.forward(torch.relu(self.first.forward(x)))

    block, last = Calls(), operation()
    call: Any = block
    if graphed:
        (call,) = capture(block, recipe=recipe, _order=[1, -1])
        capture(last, recipe=recipe)

    def run(x: torch.Tensor, first: bool) -> Any:
        with autocast(recipe):
            return last(call(x))

    return run, (block, last)


class OwnAutocast(Block):
    """The second projection, and an operation if there is one, is in an autocast of its own."""

    def __init__(self, recipe: Any, *operations: Any) -> None:
        super().__init__()
        self.recipe = recipe
        self.operations = torch.nn.Sequential(*operations)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        with autocast(self.recipe):
            return self.operations(self.second(x))


@program
def own_autocast(recipe: Any, graphed: bool) -> Any:
    """A captured module enters an autocast of its own inside the caller's, which has another recipe."""
    block, other = OwnAutocast(recipe), make_recipe("fp8-current")
    if graphed:
        capture(block, recipe=other)

    def run(x: torch.Tensor, first: bool) -> Any:
        with autocast(other):
            return block(x)

    return run, (block,)


@program
def own_autocast_of_another(recipe: Any, graphed: bool) -> Any:
    """A module that has run eagerly before, with an autocast of its own inside the caller's with delayed scaling."""
    block = OwnAutocast(make_recipe("fp8-current"), operation())
    with autocast(recipe):
        block(random())
    if graphed:
        capture(block, recipe=recipe)

    def run(x: torch.Tensor, first: bool) -> Any:
        with autocast(recipe):
            return block(x)

    return run, (block,)


@program
def checkpoint(recipe: Any, graphed: bool) -> Any:
    """`te.checkpoint` around a graph."""
    block, last = Block(), linear()
    if graphed:
        capture(block, recipe=recipe)

    def run(x: torch.Tensor, first: bool) -> Any:
        with autocast(recipe):
            return last(te.checkpoint(block, x))

    return run, (block, last)


class Recomputed(Block):
    """Two projections whose activations are recomputed in their backward."""

    def __init__(self) -> None:
        require_recomputation()
        super().__init__()

    def forward(self, x: torch.Tensor) -> Any:
        return te.checkpoint(self.second, te.checkpoint(self.first, x))


@program
def recompute_behind_another(recipe: Any, graphed: bool) -> Any:
    """`te.checkpoint` in a graph of an order, in the first microbatch, behind a module that has no backward."""
    first, block, last = linear(), Recomputed(), linear()
    runs: Any = (block, last)
    if graphed:
        runs = [capture(each, recipe=recipe, _order=[1, -1])[0] for each in runs]

    def run(x: torch.Tensor, first_microbatch: bool) -> Any:
        with autocast(recipe):
            first(x.detach())
            return runs[1](runs[0](x) if first_microbatch else x)

    return run, (block, last)


class RecomputedCached(Recomputed):
    """The same with cached weights."""

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        marks = {"is_first_microbatch": is_first_microbatch}
        return te.checkpoint(self.second, te.checkpoint(self.first, x, **marks), **marks)


@program
def recompute_after_another(recipe: Any, graphed: bool) -> Any:
    """`te.checkpoint` in a graph with cached weights; before its backward another graph has its first microbatch."""
    block, other = RecomputedCached(), linear()
    if graphed:
        for each in (block, other):
            capture(each, recipe=recipe, cache_quantized_params=True)

    def run(x: torch.Tensor, first: bool) -> Any:
        with autocast(recipe):
            out = block(x, is_first_microbatch=first)
        with autocast(recipe):
            other(x.detach(), is_first_microbatch=True)
        return out

    return run, (block,)


@program
def recompute_in_an_autocast(recipe: Any, graphed: bool) -> Any:
    """`te.checkpoint` in a graph, in the first microbatch, in an autocast inside another that is off."""
    block, last = Recomputed(), linear()
    if graphed:
        for each in (block, last):
            capture(each, recipe=recipe)

    def run(x: torch.Tensor, first: bool) -> Any:
        with te.autocast(enabled=False), autocast(recipe):
            return last(block(x) if first else x)

    return run, (block, last)


@program
def reset_between_steps(recipe: Any, graphed: bool) -> Any:
    """The program resets TE's global FP8 state between its steps; weights are cached."""
    block = linear()
    begun: list[bool] = []
    others: list[torch.Tensor] = []
    if graphed:
        capture(block, recipe=recipe, cache_quantized_params=True)

    def run(x: torch.Tensor, first: bool) -> Any:
        if first and begun:
            FP8GlobalStateManager.reset()
            others.append(torch.ones(1, device="cuda"))  # which may take memory that the reset has freed
        begun.append(first)
        with autocast(recipe):
            return block(x, is_first_microbatch=first)

    return run, (block,)


@program
def calibration(recipe: Any, graphed: bool) -> Any:
    """A graph that runs in bf16 and collects amaxes for a recipe with a short history."""
    block = Block()
    recipe = type(recipe)(amax_history_len=3)
    if graphed:
        capture(block, recipe=recipe, enabled=False, calibrating=True)

    def run(x: torch.Tensor, _: bool) -> Any:
        with te.autocast(enabled=False, calibrating=True, recipe=recipe):
            return block(x)

    return run, (block,)


@program
def operations_in_bf16(recipe: Any, graphed: bool) -> Any:
    """Operations of `te.ops` that are captured without FP8: after a forward, beside a module with FP8; to calibrate."""
    first, block, last = te.ops.Sequential(operation()), Block(), operation()
    first(random())
    if graphed:
        capture(first, block, recipe=recipe, enabled=(False, True))
        capture(last, recipe=recipe, enabled=False, calibrating=True)

    def run(x: torch.Tensor, _: bool) -> Any:
        x = first(x)
        with autocast(recipe):
            x = block(x)
        with te.autocast(enabled=False, calibrating=True, recipe=recipe):
            return last(x)

    return run, (first, block, last)


class DropGrads(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
    """Nothing in the forward, a dropout that draws from a tracker in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tracker: CudaRNGStatesTracker) -> torch.Tensor:
        ctx.tracker = tracker
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        with ctx.tracker.fork("experts"):
            return torch.nn.functional.dropout(grad, 0.3), None


class Dropout(Block):
    """Two projections with a dropout between them that draws from a tracker, in the forward and in the backward."""

    def __init__(self, tracker: CudaRNGStatesTracker) -> None:
        super().__init__()
        self.tracker = tracker

    def forward(self, x: torch.Tensor) -> Any:
        with self.tracker.fork("experts"):
            hidden = torch.nn.functional.dropout(self.first(x), 0.3)
        return self.second(DropGrads.apply(hidden, self.tracker))


@program
def other_rng_states(recipe: Any, graphed: bool, frozen: bool = False) -> Any:
    """An RNG tracker is reset, and gets the states of another one, after a graph with dropout was captured.

    With ``frozen``, garbage collection did not look through older objects in the capture, as Megatron-Core has it.
    """
    tracker, other = CudaRNGStatesTracker(), CudaRNGStatesTracker()
    other.add("experts", 3)
    tracker.add("experts", 1)
    block, begun = Dropout(tracker), []
    if graphed:
        if frozen:
            gc.freeze()
        capture(block, recipe=recipe)
        gc.unfreeze()

    def run(x: torch.Tensor, first: bool) -> Any:
        begun.append(first)
        if len(begun) == 2:
            tracker.reset()
            tracker.add("experts", 2)
        elif len(begun) == 4:
            tracker.set_states(other.get_states())
        with autocast(recipe):
            return block(x)

    return run, (block,)


def train(name: str, recipe: str, graphed: bool) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Run a program, and give what each step computed."""
    FP8GlobalStateManager.reset()
    torch.manual_seed(1)
    run, modules = PROGRAMS[name](make_recipe(recipe), graphed)
    parameters = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
    torch.manual_seed(2)
    inputs = [[(step + 1) * random() for _ in range(MICROBATCHES)] for step in range(STEPS)]
    output_grads = [[random() / 100 for _ in range(MICROBATCHES)] for _ in range(STEPS)]
    for step in range(STEPS):
        done: dict[str, list[torch.Tensor]] = {"outputs": [], "dgrads": []}
        grads = [torch.zeros_like(parameter) for parameter in parameters]
        for microbatch in range(MICROBATCHES):
            x = inputs[step][microbatch].clone().requires_grad_()
            out = run(x, microbatch == 0)
            done["outputs"].append(out.detach().clone())
            out.backward(output_grads[step][microbatch])
            assert x.grad is not None
            done["dgrads"].append(x.grad.clone())
            for parameter, grad in zip(parameters, grads, strict=True):
                if parameter.grad is not None:
                    grad.add_(parameter.grad)
                parameter.grad = None
        done["wgrads"] = grads
        done["scales"] = [state.clone() for module in modules for state in fp8_state(module)]
        with torch.no_grad():
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.sub_(LEARNING_RATE * grad)
        yield done


def fp8_state(root: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The scales and amax histories of delayed scaling in ``root``."""
    for module in root.modules():
        for fp8_meta in (getattr(module, "fp8_meta", None), *(getattr(module, "_fp8_metas", None) or {}).values()):
            for key in ("scaling_fwd", "scaling_bwd"):
                state: Any = (fp8_meta or {}).get(key)
                if hasattr(state, "amax_history"):
                    yield from (state.scale, state.amax_history)


def compare(name: str, recipe: str = "fp8-delayed") -> dict[str, Any]:
    """Run a program both ways: the errors, by step."""
    eager = list(train(name, recipe, graphed=False))
    errors: dict[str, list[float]] = {}
    for graphed, wanted in zip(train(name, recipe, graphed=True), eager, strict=True):
        for kind, tensors in wanted.items():
            errors.setdefault(kind, []).append(error(graphed[kind], tensors))
    return {"errors": errors}
