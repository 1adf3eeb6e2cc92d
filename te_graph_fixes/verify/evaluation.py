"""Training through graphs while others change the FP8 weights and scales: updates, evaluations, graphs for inference.

A program is a sequence of events of one module, run with graphs and eagerly. Memory that nobody owns gets another
content after each event.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from .gradients import CallsForward
from .training import FIRST, HIDDEN, TOKENS, error, make_recipe

EVENTS = {
    "first": "a microbatch of training whose weights are new",
    "later": "one whose weights are those of the first",
    "infer-first": "inference in the recipe of training, with new weights",
    "infer-later": "inference with the weights of the last first",
    "eager-first": "as first, without a graph",
    "eager-later": "as later, without a graph",
    "bf16": "inference without FP8 and without a graph",
    "other": "inference in another recipe and without a graph",
    "update": "an optimizer step",
    "save": "the FP8 state that a checkpoint holds",
}


@dataclass(frozen=True)
class Program:
    """What is run: `EVENTS` by name, and what is captured before them, in order.

    - ``fp8_params``: the weights are FP8, ``no_grad``: they were made without grad
    - ``update``: how they are written: ``copy``, ``master`` (by TE's function for ZeRO) or ``load`` (a state dict)
    - ``cache``: quantized weights are cached between microbatches
    - ``alone``: an operation of `te.ops` is not in a `Sequential`
    - ``by_forward``: it is in a module that calls its ``forward``
    - ``pipelined``: first and later microbatches have graphs of their own, captured with an ``_order``
    """

    events: Sequence[str]
    captures: Sequence[str] = ("train",)
    module: str = "Linear"
    recipe: str = "fp8-current"
    other: str = "fp8-delayed"
    fp8_params: bool = False
    no_grad: bool = False
    update: str = "copy"
    cache: bool = False
    alone: bool = False
    by_forward: bool = False
    pipelined: bool = False


def compare(**options: Any) -> dict[str, Any]:
    """The errors of all that a `Program` with these ``options`` computes, by event."""
    program = Program(**options)
    wanted, found = run(program, graphed=False), run(program, graphed=True)
    errors = {
        event: [error(some, right) for some, right in zip(found[event], wanted[event], strict=True)] for event in wanted
    }
    return {"errors": errors}


def run(program: Program, graphed: bool) -> dict[str, list[list[torch.Tensor]]]:
    """What each event gives, by its name and in order."""
    FP8GlobalStateManager.reset()
    recipe = make_recipe(program.recipe)
    module = make_module(program, recipe, 1)
    if program.by_forward:
        module = CallsForward(module)
    eager = module.forward
    torch.manual_seed(2)
    inputs = torch.randn(len(program.events), TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    output_grads = torch.randn_like(inputs)
    calls: dict[str, Callable[..., torch.Tensor]] = {}
    for kind in program.captures if graphed else ():
        calls |= capture(program, module, recipe, kind)
    found: dict[str, list[list[torch.Tensor]]] = {}
    for x, output_grad, event in zip(inputs, output_grads, program.events, strict=True):
        call, marks = calls.get(event, eager), {}
        if program.cache and event.endswith(("first", "later")):
            marks = {FIRST: event.endswith("first")}
        got: list[torch.Tensor] = []
        if event.startswith("infer"):
            got += infer(module, call, x, recipe, **marks)
        elif event in ("bf16", "other"):
            got += infer(module, call, x, make_recipe(program.other) if event == "other" else None)
        elif event == "update":
            update(program, module, seed=len(found.get(event, ())))
        elif event == "save":
            got += saved(module)
        else:
            x.requires_grad_()
            with te.autocast(enabled=True, recipe=recipe):
                out = call(x, **marks)
            out.backward(output_grad)
            assert x.grad is not None
            got += [out.detach().clone(), x.grad.clone(), *(each.grad.clone() for each in module.parameters())]
            module.zero_grad()
        dirty()
        found.setdefault(event, []).append(got)
    return found


def make_module(program: Program, recipe: Any, seed: int) -> Any:
    """A module of the program; equal seeds give equal weights."""
    torch.manual_seed(seed)
    sizes: tuple[int, ...] = {
        "GroupedLinear": (2, HIDDEN, HIDDEN),
        "LayerNormMLP": (HIDDEN, 2 * HIDDEN),
    }.get(program.module, (HIDDEN, HIDDEN))
    operation = program.module.startswith("ops.")
    options: dict[str, Any] = {
        "bias": False,
        "device": "cuda",
        "dtype" if operation else "params_dtype": torch.bfloat16,
    }
    with (
        torch.set_grad_enabled(not program.no_grad),
        te.quantized_model_init(enabled=program.fp8_params, recipe=recipe),
    ):
        if operation:
            made = getattr(te.ops, program.module.removeprefix("ops."))(*sizes, **options)
            return made if program.alone else te.ops.Sequential(made)
        module = getattr(te, program.module)(*sizes, **options)
    if program.module == "GroupedLinear":
        forward = module.forward
        module.forward = lambda x, **marks: forward(x, [TOKENS // 2] * 2, **marks)
    return module


def capture(program: Program, module: Any, recipe: Any, kind: str) -> dict[str, Callable[..., torch.Tensor]]:
    """Graphs of the module for training or for inference (``kind``), by event; the module itself stays as it was."""
    forward, training = module.forward, kind == "train"
    module.train(training)
    pipelined = program.pipelined and training
    samples = [
        (torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda", requires_grad=training),) for _ in "ab"
    ]
    with torch.set_grad_enabled(training):
        graphs = te.make_graphed_callables(
            (module,),
            samples if pipelined else tuple(samples[:1]),
            sample_kwargs=[{}, {}] if pipelined else None,
            _order=[1, -1] * 2 if pipelined else None,
            enabled=True,
            recipe=recipe,
            cache_quantized_params=program.cache,
        )
    if not pipelined:
        graphs = module.forward, module.forward
    module.forward = forward
    module.train()
    return dict(zip(("first", "later") if training else ("infer-first", "infer-later"), graphs, strict=True))


def infer(module: Any, call: Callable[..., torch.Tensor], x: torch.Tensor, recipe: Any, **marks: bool) -> list[Any]:
    module.eval()
    with torch.no_grad(), te.autocast(enabled=recipe is not None, recipe=recipe):
        out = call(x, **marks).clone()
    module.train()
    return [out]


def update(program: Program, module: Any, seed: int) -> None:
    """Write new values into every parameter."""
    from transformer_engine.pytorch.tensor.utils import cast_master_weights_to_fp8

    if program.update == "load":
        module.load_state_dict(make_module(program, make_recipe(program.recipe), 100 + seed).state_dict())
        return
    torch.manual_seed(seed)
    for parameter in module.parameters():
        values = 0.1 * torch.randn(parameter.shape, dtype=torch.bfloat16, device="cuda")
        with torch.no_grad():
            if program.update == "master" and parameter.dim() == 2:
                with mock.patch("torch.distributed.all_reduce"):  # one rank
                    cast_master_weights_to_fp8([parameter], [values.float().view(-1)], [0], None)
            else:
                parameter.copy_(values)


def saved(module: Any) -> list[torch.Tensor]:
    """Whether there is an extra state, and the scales and amax histories in it: its size varies as pickle shares."""
    found = []
    for name, value in module.state_dict().items():
        if name.endswith("_extra_state"):
            found.append(torch.tensor([float(value.numel() > 0)]))
            state = pickle.loads(value.numpy().tobytes()) if value.numel() else {}
            for part in (state, *(state.get(mode, {}) for mode in ("forward", "backward"))):
                found += [part[key] for key in sorted(part) if key.startswith(("scale", "amax"))]
    return found


def dirty() -> None:
    """Give memory that nobody owns another content: NaN in FP8."""
    for power in range(9, 19):
        held = [torch.full((2**power,), 0x7F, dtype=torch.uint8, device="cuda") for _ in range(32)]
        del held
