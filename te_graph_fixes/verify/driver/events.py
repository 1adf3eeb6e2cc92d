"""The events of programs, found by their names, and the run of a program."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
import transformer_engine.pytorch as te
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from .graphs import fused
from .modules import Block, torch_linear
from .replays import *  # noqa: F403  # events too
from .setting import SIMULATED, TOKENS, autocast, program, random, seed_tracker, tracker
from .training import Training

step = Training.run
step_at_rate_0 = functools.partial(step, rate=0.0)
skipped_step = functools.partial(step, skip=True)
eager_step = functools.partial(step, eager=True)
interrupted_step = functools.partial(step, interrupted=True)
evaluate = Training.evaluation
evaluate_in_bf16 = functools.partial(evaluate, recipe="bf16")
evaluate_in_inference_mode = functools.partial(evaluate, mode=torch.inference_mode)


def evaluate_in_other(t: Training) -> None:
    t.evaluation(program.other)


@torch.no_grad()
def evaluate_average(t: Training) -> None:
    """With other weights, those and back, as with an average of them."""
    kept = [each.detach().clone() for each in t.parameters]
    for each in t.parameters:
        each.copy_(each.dequantize() / 2)
    t.evaluation()
    for each, weight in zip(t.parameters, kept, strict=True):
        each.copy_(weight)


def infer(t: Training) -> None:
    """Run the first layer without gradients, through its graph for inference.

    With the weights that the last step has cached, where there were only steps since another one.
    """
    before = " ".join(program.events[: int(t.event.split()[0])])
    first = program.weights != "cached" or not re.search(r"infer( step)+$", before)
    if first:
        t.mark_first()
    call = t.infer if t.graphed else t.forwards[0]
    t.layers[0].eval()
    with torch.no_grad(), autocast(t.recipe if t.fp8(0) else "bf16"):
        marks = {"is_first_microbatch": first} if program.weights == "cached" and t.graphed else {}
        t.see("outputs", call(random(), **marks))
    t.layers[0].train()


def save(t: Training) -> None:
    t.saved = [{name: value.clone() for name, value in layer.state_dict().items()} for layer in t.layers]
    if program.tracker:
        t.saved_states = {name: each.clone_state() for name, each in tracker.get_states().items()}


def load(t: Training) -> None:
    for layer, state in zip(t.layers, getattr(t, "saved", ()), strict=False):
        layer.load_state_dict(state)
    if program.tracker and hasattr(t, "saved_states"):
        tracker.set_states({name: each.clone_state() for name, each in t.saved_states.items()})


def reseed_tracker(t: Training) -> None:
    seed_tracker(int(t.event.split()[0]) + 2)


def recapture(t: Training) -> None:
    """And a step, since a capture makes FP8 state, and eager training only its first forward."""
    if t.graphed:
        t.release()
        t.capture()
    t.run()


def switch_recipe(t: Training) -> None:
    """To the other recipe, and back the next time."""
    t.recipe = program.other if t.recipe == program.recipe else program.recipe
    recapture(t)


def freeze(t: Training) -> None:
    t.layers[-1].requires_grad_(False)
    t.weights -= {*t.layers[-1].parameters()}
    recapture(t)


def unfreeze(t: Training) -> None:
    t.layers[-1].requires_grad_(True)
    t.weights |= {*fused(t.layers[-1])}
    recapture(t)


def reset_fp8(t: Training) -> None:
    FP8GlobalStateManager.reset()
    t.other = torch.ones(1, device="cuda")  # may get the memory of the skip flag that graphs read


def raise_in_autocast(t: Training) -> None:
    """A forward whose backward never comes, and an exception inside an autocast."""
    t.begin()
    with contextlib.suppress(ZeroDivisionError), autocast(t.recipe):
        t.forward(random(), t.chunk(0), 0)
        raise ZeroDivisionError


class Failing(Block):
    """Fails in its third forward."""

    forwards = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.forwards += 1
        if self.forwards == 3:
            raise ZeroDivisionError
        return super().forward(x)


def failed_capture(t: Training) -> None:
    """Captures of another layer fail: in its forward, and since it is said to be two."""
    layer, sample = Failing(), random().requires_grad_()
    t.prepare(-1, layer)
    for options in {"num_warmup_iters": 2}, {"enabled": (True, True)}:
        with contextlib.suppress(ZeroDivisionError, AssertionError, ValueError):
            if t.graphed:
                t.graph(layer, (sample,), **options)


def refused(t: Training, misuse: Any) -> None:
    """A graph must refuse what is not as its samples."""
    (x,), marks = pytree.tree_map(torch.Tensor.detach, t.samples(0))
    if program.weights == "cached":
        marks["is_first_microbatch"] = True
    if t.graphed:
        try:
            misuse(t.calls[0][0], x, marks)
        except (TypeError, ValueError, RuntimeError) as error:
            if "captured for" in str(error):
                return
        t.see("taken", torch.ones(1))


def misusing(misuse: Any) -> Any:
    """The event of a call that gets a graph, its input and its keyword arguments."""
    return lambda t: refused(t, misuse)


misuse_keyword = misusing(lambda call, x, marks: call(inp=x, **marks))
misuse_shape = misusing(lambda call, x, marks: call(pytree.tree_map(lambda each: each[: TOKENS // 2], x), **marks))
misuse_keys = misusing(lambda call, x, marks: call(dict(reversed(x.items())), **marks))
misuse_missing = misusing(lambda call, x, marks: call(**marks))


def misuse_backward(t: Training) -> None:
    """A backward of a graph that was captured without gradients."""
    layer, sample = torch_linear(), random().requires_grad_()

    def backward(*_: Any) -> None:
        with torch.no_grad():
            graphed = te.make_graphed_callables(layer, (sample,), allow_unused_input=True)
        graphed(sample).sum().backward()

    refused(t, backward)


def dirty() -> None:
    """Give memory that nobody owns another content: NaN in FP8. The simulator does this by itself."""
    for power in range(9, 19):
        held = [torch.full((2**power,), 0x7F, dtype=torch.uint8, device="cuda") for _ in range(32)]
        del held


OF_GRAPHS = "memory with graphs"
"""What eager training has nothing to compare with: runs through graphs are compared by it, with and without a fix."""


def train(graphed: bool) -> dict[str, list[torch.Tensor | None]]:
    """Run the program: all that it computed, and what it left behind, by event."""
    t = Training(graphed)
    for number, event in enumerate(program.events):
        torch.manual_seed(number + 2 + (100 * dist.get_rank() if program.ranks else 0))
        t.event = f"{number} {event}"
        name, *numbers = event.split()
        globals()[name](t, *map(int, numbers))
        t.state()
        if not SIMULATED:
            dirty()
    if graphed:
        if SIMULATED:
            t.seen[OF_GRAPHS] = [torch.tensor([torch.cuda.memory_reserved(), torch.cuda.memory_allocated()])]
        t.release()
    t.event, seen = "released", t.seen
    if SIMULATED:
        t.calls, t.eager, t.forwards, t.under_way, t.run_before = [], [], [], [], []
        gc.collect()
        t.see("memory of graphs", torch.tensor([torch.cuda.memory_allocated()]))
    return seen
