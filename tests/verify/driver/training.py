"""The steps of a program, and the record of their results."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar
from unittest import mock

import torch
import transformer_engine.pytorch as te
from torch.utils.checkpoint import checkpoint
from transformer_engine.pytorch.graph import is_graph_capturing
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from .graphs import MARKS_OF_THE_LOOP, OF_CLASSES, Captured, arguments, delayed, set_mark
from .setting import RATE, TOKENS, autocast, program, random, the_tracker, tracker

EVENTS: dict[str, Callable[..., None]] = {}
"""The functions of events by name. In programs, the numbers after an event's name are arguments of its function."""
Event = TypeVar("Event", bound=Callable[..., None])


def event(function: Event, name: str = "") -> Event:
    """Register the ``function`` of an event under ``name``, by default its own name, and return it."""
    EVENTS[name or function.__name__] = function
    return function


class Training(Captured):
    """The steps and evaluations of a program, run eagerly or through graphs, and the record of their results."""

    saved: list[dict[str, torch.Tensor]]
    other: torch.Tensor
    saved_states: dict[str, torch.Generator]

    def see(self, what: str, *values: torch.Tensor | None) -> None:
        """Record copies of ``values`` under the name ``what``, for the comparison."""
        kept = self.seen.setdefault(f"{self.event}: {what}", [])
        kept += [None if value is None else comparable(value) for value in values]

    def marked(self, *layers: Any) -> list[Any]:
        """Return the modules of these layers (by default, of all layers) that have an ``is_first_microbatch``."""
        modules = [module for layer in layers or self.layers for module in layer.modules()]
        return [module for module in modules if hasattr(module, "is_first_microbatch")]

    def mark_first(self, *layers: Any) -> None:
        for module in self.marked(*layers) if program.weights not in OF_CLASSES else ():
            module.is_first_microbatch = True

    def layer(self, number: int, call: Any, x: torch.Tensor, microbatch: int, graphed: bool) -> torch.Tensor:
        """Run a layer through ``call``, and return its main output. Record its other outputs."""
        given, options = arguments(self.layers[number], x, x.detach() / 2)
        if program.hooks == "ddp" and call is self.layers[number]:
            call = self.reducing[number]
        if program.weights == "cached" and graphed and number not in program.not_captured:
            options["is_first_microbatch"] = microbatch == 0
        for module in self.marked(self.layers[number]) if program.weights in MARKS_OF_THE_LOOP else ():
            set_mark(module, microbatch == 0)
        in_bf16 = number in program.in_bf16
        if program.checkpoints and not in_bf16:
            call = checkpointed(program.checkpoints[number], call)
        with te.autocast(enabled=False) if in_bf16 else contextlib.nullcontext():
            out = call(*given, **options)
        if hasattr(self.layers[number], "finish"):
            out = self.layers[number].finish(*out)
        if not isinstance(out, tuple):
            return out
        main, *others = sorted(out, key=lambda x: x is not out[getattr(self.layers[number], "main_output", 0)])
        self.see("outputs", *others)
        return main

    def before(self, x: torch.Tensor, microbatch: int, calls: list[list[Any]], graphed: bool) -> torch.Tensor:
        """Run the extra computation before the layers (`program.first`). Return the input of the first layer."""
        marks = {}
        if program.weights == "cached":
            marks["is_first_microbatch"] = microbatch == 0
        extra = self.extra if graphed else self.extra_forward
        if program.first == "eager" and microbatch == 0:
            extra(x.detach())
        elif program.first == "frozen":
            return extra(x.detach(), **marks) + x
        elif program.first == "plain":
            return extra(x).detach() + x
        elif program.first == "teacher":
            with torch.no_grad():
                target = extra(x, **marks)
            return x - target.clone()
        elif program.first == "distillation":
            with torch.no_grad():
                target = self.layer(0, calls[0][microbatch], x / 2, microbatch, graphed).clone()
            return x - target
        return x

    def forward(self, x: torch.Tensor, layers: Iterable[int], microbatch: int, eager: bool = False) -> torch.Tensor:
        """Run a microbatch through ``layers``, and return the output."""
        calls = self.eager if eager else self.calls
        graphed = self.graphed and not eager
        given = x
        if program.sets_flag:
            FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(microbatch > 0)
        outer = {"one": self.recipe, "nested": program.other}.get(program.autocasts)
        with autocast(outer) if outer else contextlib.nullcontext():
            x = self.before(x, microbatch, calls, graphed)
            for number in layers:
                with autocast(self.recipe) if program.autocasts in ("each", "nested") else contextlib.nullcontext():
                    x = self.layer(number, calls[number][microbatch], x, microbatch, graphed)
        if program.in_place:
            return x.add_(given)
        return x + given if program.residual else x

    def begin(self, eager: bool = False) -> None:
        """Mark the next forward of each module as a first microbatch, and run the other model, if any."""
        self.mark_first()
        if program.first == "cached":  # another model runs before this one
            extra = self.extra if self.graphed and not eager else self.extra_forward
            for microbatch in range(2):
                with autocast(self.recipe):
                    self.see("outputs", extra(random(), is_first_microbatch=microbatch == 0))

    def run(self, rate: float = RATE, skip: bool = False, eager: bool = False, interrupted: bool = False) -> None:
        """Run a training step.

        If ``skip`` is true, drop the step's gradients. If ``interrupted`` is true, evaluate after the first backward
        of each chunk.
        """
        self.begin(eager)
        counts: dict[float, int] = {}
        live: dict[tuple[int, int], Any] = {}
        if program.fit:
            torch.manual_seed(0)  # so all steps have the same inputs and targets
        order = program.order or (1, -1) * self.microbatches
        sends = Sends(order)
        for position, entry in enumerate(order):
            self.see("dgrads", *sends.received_before(position))
            chunk, microbatch = abs(math.ceil(entry)) - 1, counts.get(entry, 0)
            counts[entry] = microbatch + 1
            layers = self.chunk(chunk)
            if entry > 0:
                sizes = (1.0, 1.0) if program.fit else (len(self.seen) / 4 + 1, 0.01)
                x, output_grad = map(random, sizes)  # with ``fit``, `output_grad` is the target
                if program.strided:
                    x, output_grad = (tensor.t().contiguous().t() for tensor in (x, output_grad))
                if program.same_input:
                    x = self.input.detach().copy_(x)
                if program.input_grads:
                    x.requires_grad_()
                copied = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept)
                with copied if program.offload else contextlib.nullcontext():
                    out = self.forward(x, layers, microbatch, eager)
                self.see("outputs", out)
                live[chunk, microbatch] = x, out, output_grad
            elif entry % 1 == 0:
                x, out, output_grad = live.pop((chunk, microbatch))
                if (out.shape, out.dtype) != (output_grad.shape, output_grad.dtype):
                    output_grad = torch.randn_like(out)
                if program.fit:
                    output_grad = (out.detach() - output_grad) * (2.5 / TOKENS / self.microbatches)
                out.backward(output_grad)
                if program.input_grads:
                    self.see("dgrads", *sends.read_after(position, x.grad))
                if interrupted and not microbatch:
                    self.evaluation(program.other)
                if program.drops_dummies:
                    for parameter in self.weights:
                        parameter.grad = None
            if program.delay and entry < 0 and (entry % 1 or entry - 0.5 not in program.order):
                for number in reversed(layers):
                    self.wgrad(number, microbatch, eager)
            for parameter in self.parameters if program.takes_grads else ():
                if parameter.grad is not None:
                    parameter.taken.add_(parameter.grad)
                    parameter.grad = None
        self.see("dgrads", *sends.in_flight)
        self.update(0.0 if skip else rate, skip)

    def wgrad(self, number: int, microbatch: int, eager: bool) -> None:
        """Compute the delayed wgrads of a layer. Eager training delays no wgrads, so it only records hook calls."""
        if self.graphed and not eager:
            call = self.calls[number][microbatch]
            if hasattr(call, "backward_dw"):
                call.backward_dw()
            return
        for index, module in enumerate(delayed(self.layers[number])):
            if self.graphed:
                type(module).backward_dw(module)
            elif program.wgrad_hooks:
                self.called.append(f"wgrad {number} {index}")

    def update(self, rate: float, skip: bool = False) -> None:
        """Record the gradients, update the parameters, and clear the gradients."""
        for weight in self.fused_weights() if program.clears_marks else ():
            self.see("marks", torch.tensor([float(weight.grad_added_to_main_grad)]))
            weight.grad_added_to_main_grad = False
        for parameter in self.parameters:
            if parameter in self.weights:
                grad = parameter.main_grad
            elif program.takes_grads or program.hooks in ("takes", "of the node"):
                grad = parameter.taken.clone() if hasattr(parameter, "taken") else None
            else:
                grad = parameter.grad
            self.see("wgrads", grad)
            if grad is not None and not skip and parameter.requires_grad:
                self.change(parameter, grad, rate)
            if hasattr(parameter, "taken"):
                parameter.taken.zero_()
            if program.keeps_grads and parameter not in self.weights and parameter.grad is not None:
                parameter.grad.zero_()
            else:
                parameter.grad = None
            if parameter in self.weights:
                parameter.main_grad.zero_()  # only after a step, so that values left by a capture are detected
        if program.optimizer in ("adam", "adam of master weights"):
            self.adam.param_groups[0]["lr"] = rate
            self.adam.step()
            self.adam.zero_grad()

    @torch.no_grad()
    def change(self, parameter: Any, grad: torch.Tensor, rate: float) -> None:
        """Update a parameter with its gradient, or pass the gradient to the optimizer."""
        if program.optimizer in ("adam", "adam of master weights"):
            parameter.decoupled_grad = grad.clone()
        elif program.optimizer == "master weights":
            self.master[parameter] -= rate * grad
            if hasattr(parameter, "quantize_"):
                from transformer_engine.pytorch.tensor.utils import cast_master_weights_to_fp8

                with mock.patch("torch.distributed.all_reduce"):  # this program has only one rank
                    cast_master_weights_to_fp8([parameter], [self.master[parameter].view(-1)], [0], None)
            else:
                parameter.copy_(self.master[parameter])
        else:
            parameter.copy_(parameter.dequantize() - rate * grad)

    def evaluation(self, recipe: str = "", mode: Any = torch.no_grad) -> None:
        """Evaluate without gradients and graphs, in ``recipe`` or, by default, in the recipe of the training."""
        marks = {module: module.is_first_microbatch for module in self.marked()}
        self.mark_first()
        for layer in self.layers:
            layer.eval()
        kept, self.recipe = self.recipe, recipe or self.recipe
        with mode():
            self.see("outputs", self.forward(random(), self.chunk(0), 0, eager=True))
        self.recipe = kept
        for layer in self.layers:
            layer.train()
        for module, mark in marks.items():  # In an interrupted step, the evaluation must not add a first microbatch.
            set_mark(module, mark)

    def state(self) -> None:
        """Record the state that later steps and checkpoints use, and the state of the process."""
        self.see("parameters", *(parameter.dequantize() for parameter in self.parameters))
        if self.recipe != "bf16" and any(name.endswith("outputs") for name in self.seen):
            for layer in self.layers:  # unlike a capture, eager training creates FP8 state only in its first forward
                self.see("FP8 state", *fp8_state(layer))
        self.see("RNG state", torch.cuda.get_rng_state())
        if program.tracker:
            self.see("RNG state", *(generator.get_state() for generator in tracker.get_states().values()))
        modules = [module for layer in self.layers for module in layer.modules()]
        left = [
            *self.called,
            f"gc {gc.isenabled()}",
            f"capturing {is_graph_capturing()} {FP8GlobalStateManager.fp8_graph_capturing()}",
            f"FP8 {FP8GlobalStateManager.is_fp8_enabled()} {FP8GlobalStateManager.is_fp8_calibration()}",
            f"grad {torch.is_grad_enabled()} {torch.is_inference_mode_enabled()}",
            *(f"{type(module).__name__} {type(module).__call__ is torch.nn.Module.__call__}" for module in modules),
            *(len(getattr(module, "_fp8_workspaces", ())) for module in modules if program.weights == "plain"),
            *(f"{module.training} {len(module._forward_hooks)} {len(module._forward_pre_hooks)}" for module in modules),
            *(f"{parameter.requires_grad} {len(parameter._backward_hooks or ())}" for parameter in self.parameters),
        ]
        self.called.clear()
        self.see("left behind", torch.tensor(list("\n".join(map(str, left)).encode())))


class Sends:
    """The input grads that a step sends to the previous pipeline stage. They are read as late as Megatron-Core allows.

    Megatron-Core waits for a send after issuing the next model chunk's backward and the overlapping forward. A program
    whose first chunk sends nothing is the first stage. In its cooldown, Megatron-Core waits for each send immediately,
    and thereby for all earlier sends. ``overlap_p2p_comm_warmup_flush`` is assumed to be off.
    """

    def __init__(self, order: Sequence[float]) -> None:
        self.order, self.in_flight = order, list[torch.Tensor | None]()
        self.first_layers = {1, *program.sends}
        self.last_forward = max(i for i, entry in enumerate(order) if entry > 0)

    def received_before(self, position: int) -> list[torch.Tensor | None]:
        """Return a list with the grad whose send completes before the entry at ``position``, or []."""
        entry = self.order[position]
        is_due = len(self.in_flight) > 1 and (entry < 0 or entry in self.first_layers)
        return [self.in_flight.pop(0)] if is_due else []

    def read_after(self, position: int, grad: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Return the grads to be read right after the backward that returned ``grad``, or []."""
        if -self.order[position] not in program.sends:
            return [grad]
        self.in_flight.append(grad)
        cooldown = {-entry for entry in self.order[self.last_forward + 1 : position]}
        if 1 in program.sends or not cooldown & self.first_layers:
            return []
        read, self.in_flight = self.in_flight, []
        return read


def comparable(value: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor as floating-point numbers or as bytes, because not every dtype can be compared."""
    copy = value.detach().clone().resolve_conj().resolve_neg()
    if copy.is_complex():
        return torch.view_as_real(copy)
    return copy if copy.is_floating_point() and copy.itemsize > 1 else copy.reshape(-1).view(torch.uint8)


def checkpointed(kind: str, call: Any) -> Any:
    """Return ``call`` inside a checkpoint of TE or torch, or ``call`` itself if ``kind`` is empty.

    Kinds of torch's checkpoint other than ``reentrant`` also recompute an operation before and after ``call``.
    """
    if kind == "te":
        return functools.partial(te.checkpoint, call, get_rng_state_tracker=the_tracker())
    if not kind:
        return call

    def between(x: torch.Tensor) -> Any:
        return torch.sin(call(torch.sin(x)))

    run = call if kind == "reentrant" else between
    return functools.partial(checkpoint, run, use_reentrant=kind != "not reentrant")


def fp8_state(layer: Any) -> list[torch.Tensor]:
    """Return the scales and amax histories of a layer, both from its modules and from its ``state_dict()``."""
    tensors = []
    for module in layer.modules():
        for fp8_meta in (getattr(module, "fp8_meta", None), *(getattr(module, "_fp8_metas", None) or {}).values()):
            for key in ("scaling_fwd", "scaling_bwd"):
                state: Any = (fp8_meta or {}).get(key)
                if hasattr(state, "amax_history"):
                    tensors += [state.scale, state.amax_history]
    for name, value in layer.state_dict().items():
        if name.endswith("_extra_state") and value is not None:
            tensors.append(torch.tensor([float(value.numel() > 0)]))
            held = pickle.loads(value.cpu().numpy().tobytes()) if value.numel() else {}
            for part in (held, *(held.get(mode, {}) for mode in ("forward", "backward"))):
                tensors += [part[key] for key in sorted(part) if key.startswith(("scale", "amax"))]
    return tensors
