"""Events of programs, such as steps, inference, failed captures and calls with wrong arguments, and `train`."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
import transformer_engine.pytorch as te
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from . import outputs, replays  # noqa: F401  # these imports register modules and events
from .graphs import delayed
from .modules import MODULES, Block, torch_linear
from .setting import SIMULATED, TOKENS, autocast, program, random, seed_tracker, tracker
from .training import EVENTS, Training, event, fp8_state

step = event(Training.run, "step")
eager_step = event(functools.partial(Training.run, eager=True), "eager_step")
evaluate = event(Training.evaluation, "evaluate")
evaluate_in_bf16 = event(functools.partial(Training.evaluation, recipe="bf16"), "evaluate_in_bf16")
evaluate_in_other = event(lambda t: t.evaluation(program.other), "evaluate_in_other")


@event
def infer(t: Training) -> None:
    """Run the first layer without gradients, through its graph for inference.

    If only steps have run since the last inference, use the cached weights of the last step.
    """
    before = " ".join(program.events[: int(t.event.split()[0])])
    first = program.weights != "cached" or not re.search(r"infer( step)+$", before)
    if first:
        t.mark_first()
    call = t.infer if t.graphed else t.forwards[0]
    t.layers[0].eval()
    without_grad = torch.inference_mode() if program.inference_mode else torch.no_grad()
    with without_grad, autocast(t.recipe if t.fp8(0) else "bf16"):
        marks = {"is_first_microbatch": first} if program.weights == "cached" and t.graphed else {}
        t.see("outputs", call(random(), **marks))
    t.layers[0].train()


@event
def save(t: Training) -> None:
    t.saved = [{name: value.clone() for name, value in layer.state_dict().items()} for layer in t.layers]
    if program.tracker:
        t.saved_states = {name: generator.clone_state() for name, generator in tracker.get_states().items()}


@event
def load(t: Training) -> None:
    for layer, state in zip(t.layers, getattr(t, "saved", ()), strict=False):
        layer.load_state_dict(state)
    if program.tracker and hasattr(t, "saved_states"):
        tracker.set_states({name: generator.clone_state() for name, generator in t.saved_states.items()})


@event
def reseed_tracker(t: Training) -> None:
    seed_tracker(int(t.event.split()[0]) + 2)


@event
def recapture(t: Training) -> None:
    """Capture again, and run a step.

    Without the step, only the training with graphs would have the FP8 state that a capture creates, because eager
    training creates this state in its first forward.
    """
    if t.graphed:
        t.release()
        t.capture()
    t.run()


@event
def reset_fp8(t: Training) -> None:
    FP8GlobalStateManager.reset()
    t.other = torch.ones(1, device="cuda")  # this tensor may get the memory of the skip flag, which graphs still read


FAILURES = (
    *("warmup forward", "warmup backward", "capture forward", "capture backward", "capture wgrad"),
    *("spoiled forward", "spoiled backward", "no module", "other arguments"),
)
"""The ways in which a capture can fail. A ``spoiled`` capture becomes invalid, because it reads a value on the host."""


class Failing(Block):
    """A block that raises an error at ``failure``, one of the `FAILURES`, in a capture with two warmup iterations."""

    failure, count = "", 0

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        if self.failure:
            self.act("forward", out)
            out.register_hook(lambda grad: self.act("backward", grad))
        return out

    def act(self, part: str, tensor: torch.Tensor) -> None:
        when, wanted = self.failure.split()
        self.count += part == wanted
        if part == wanted and self.count == (1 if when == "warmup" else 3):
            if when == "spoiled":
                tensor.sum().item()
            raise ZeroDivisionError


class NotAModule:
    """An argument for which TE raises an error only after a capture has begun."""

    def modules(self) -> list[object]:
        return []


def train_eagerly(t: Training, layer: Any, recipe: str) -> None:
    """Run an eager step of two microbatches with ``layer``, which is not one of the program's layers."""
    t.mark_first(layer)
    for _ in range(2):
        if program.delay:  # TE's `backward_dw` replaces a gradient, but a backward without delay adds to it
            layer.zero_grad()
        x = random().requires_grad_()
        with autocast(recipe):
            out = layer(x)
        out.backward(random())
        for module in delayed(layer) if program.delay and t.graphed else ():
            module.backward_dw()
        t.see("outputs of another", out)
        t.see("dgrads of another", x.grad)
        t.see(
            "wgrads of another", *(getattr(parameter, "main_grad", parameter.grad) for parameter in layer.parameters())
        )


@event
def failed_capture(t: Training, *numbers: int, kind: type[Failing] = Failing, **enabled: bool) -> None:
    """For each selected failure of `FAILURES`, train a new layer eagerly before and after a capture that fails."""
    for failure in [FAILURES[number] for number in numbers or (2, 8)]:
        layer, x = kind(), random().requires_grad_()
        t.prepare(-1, layer)
        train_eagerly(t, layer, t.recipe)
        layer.failure, layer.count = failure, 0
        if failure == "capture wgrad":
            layer.second.backward_dw = lambda layer=layer: layer.act("wgrad", layer.second.weight)
        x.grad = torch.ones_like(x)
        modules = (layer, NotAModule()) if failure == "no module" else (layer,)
        options: dict[str, Any] = {"enabled": (True, True)} if failure == "other arguments" else enabled
        expected = ZeroDivisionError, RuntimeError, AssertionError, ValueError, TypeError
        if t.graphed:
            with contextlib.suppress(*expected):
                t.graph(modules, ((x,),) * len(modules), num_warmup_iters=2, **options)
        layer.failure = ""
        vars(layer.second).pop("backward_dw", None)
        hooks = torch.tensor([len(module._forward_hooks) for module in layer.modules()])
        t.see("left behind", x.grad, hooks, torch.tensor([type(layer).__call__ is torch.nn.Module.__call__]))
        t.see("FP8 state of another", *fp8_state(layer))
        train_eagerly(t, layer, t.recipe)


@event
def train_another(t: Training) -> None:
    """Train a new module of the last layer's kind, eagerly and in the second recipe."""
    train_eagerly(t, MODULES[program.modules[-1]](), program.other)


def warned(t: Training, words: str, x: torch.Tensor) -> None:
    """Run two replays without gradients. Record a mismatch unless exactly one warning contains ``words``."""
    if t.graphed:
        with warnings.catch_warnings(record=True) as messages, torch.no_grad():
            warnings.simplefilter("always")
            for _ in range(2):
                t.calls[0][0](x)
        if sum(words in str(warning.message) for warning in messages) != 1:
            t.see("warned", torch.ones(1))


cast_input = event(lambda t: warned(t, "The graph casts them", random().float()), "cast_input")
outside_of_the_autocast = event(lambda t: warned(t, "outside te.autocast", random()), "outside_of_the_autocast")


def refused(t: Training, misuse: Any) -> None:
    """Let ``misuse`` call a graph with wrong arguments. Record a mismatch unless this raises an expected error."""
    (x,), marks = pytree.tree_map(torch.Tensor.detach, t.samples(0))
    if program.weights == "cached":
        marks["is_first_microbatch"] = True
    if t.graphed:
        try:
            misuse(t.calls[0][0], x, marks)
        except (TypeError, ValueError, RuntimeError) as error:
            if re.search("captured for|has no backward|not in sample_kwargs", str(error)):
                return
        t.see("taken", torch.ones(1))


def half(x: torch.Tensor) -> torch.Tensor:
    return x[: TOKENS // 2]


def misusing(name: str, misuse: Any) -> Any:
    """Register an event that requires an error from ``misuse(graph, input, keywords)``, and return the event."""
    return event(lambda t: refused(t, misuse), name)


misuse_keyword = misusing("misuse_keyword", lambda call, x, marks: call(inp=x, **marks))
misuse_shape = misusing("misuse_shape", lambda call, x, marks: call(pytree.tree_map(half, x), **marks))
misuse_keys = misusing("misuse_keys", lambda call, x, marks: call(dict(reversed(x.items())), **marks))
misuse_key = misusing("misuse_key", lambda call, x, marks: call({"x": x["x"]}, **marks))
misuse_missing = misusing("misuse_missing", lambda call, x, marks: call(**marks))
misuse_more = misusing("misuse_more", lambda call, x, marks: call(x, x, **marks))
misuse_grad = misusing("misuse_grad", lambda call, x, marks: call(x.clone().requires_grad_(), **marks))


@event
def misuse_backward(t: Training) -> None:
    """Require an error from the backward of a graph that was captured without gradients."""
    layer, sample = torch_linear(), random().requires_grad_()

    def backward(*_: Any) -> None:
        with torch.no_grad():
            graphed = te.make_graphed_callables(layer, (sample,), allow_unused_input=True)
        graphed(sample).sum().backward()

    refused(t, backward)


def dirty() -> None:
    """Fill free memory with 0x7F bytes, which are NaN in FP8. On the simulator, new memory is always NaN."""
    for power in range(9, 19):
        held = [torch.full((2**power,), 0x7F, dtype=torch.uint8, device="cuda") for _ in range(32)]
        del held


OF_GRAPHS = "memory with graphs"
"""The name of a result that only runs with graphs have, so it is not compared with eager training."""


def train(graphed: bool) -> dict[str, list[torch.Tensor | None]]:
    """Run the program with graphs or eagerly. Return its results and states by name, such as ``0 step: outputs``."""
    t = Training(graphed)
    for number, words in enumerate(program.events):
        torch.manual_seed(number + 2 + (100 * dist.get_rank() if program.ranks else 0))
        t.event = f"{number} {words}"
        name, *numbers = words.split()
        EVENTS[name](t, *map(int, numbers))
        t.state()
        if not SIMULATED:
            dirty()
    if graphed:
        if SIMULATED:
            t.seen[OF_GRAPHS] = [torch.tensor([torch.cuda.memory_reserved(), torch.cuda.memory_allocated()])]
        t.release()
    t.event, seen = "released", t.seen
    if SIMULATED:
        t.calls, t.eager, t.forwards, t.in_flight, t.run_before, t.kept = [], [], [], [], [], []
        gc.collect()
        t.see("memory of graphs", torch.tensor([torch.cuda.memory_allocated()]))
    return seen
