"""Events of a training program: single forwards and backwards, and events that break replay preconditions.

The numbers after an event's name select graphs, microbatches or layers.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import transformer_engine.pytorch as te

from .graphs import fused
from .modules import linear
from .setting import RATE, autocast, program, random
from .training import Training, event

update = event(functools.partial(Training.update, rate=RATE), "update")


@event
def forward(t: Training, graph: int = 0, *layers: int) -> None:
    """Run a forward through the graphs of microbatch ``graph``, in all layers or only in ``layers``."""
    run_forward(t, random().requires_grad_(program.input_grads), graph, layers)


@event
def forward_again(t: Training, graph: int = 0) -> None:
    """Run a forward with the input of the previous microbatch, so that the gradients of this input add up."""
    run_forward(t, t.run_before[-1][0], graph)


def run_forward(t: Training, x: torch.Tensor, graph: int, layers: tuple[int, ...] = ()) -> None:
    microbatch = x, t.forward(x, layers or t.chunk(0), graph)
    t.in_flight.append(microbatch)
    t.run_before.append(microbatch)
    t.see("outputs", microbatch[1])


@event
def forward_without_grad(t: Training, graph: int = 0) -> None:
    with torch.no_grad():
        t.see("outputs", t.forward(random(), t.chunk(0), graph))


@event
def backward(t: Training, number: int = 0) -> None:
    """Run the backward of the microbatch at position ``number`` among those in flight."""
    x, out = t.in_flight.pop(number)
    out.backward(random())
    t.see("dgrads", x.grad)


@event
def backward_and_keep(t: Training) -> None:
    """Run a backward with ``retain_graph=True``, so that the backward can be repeated."""
    t.in_flight[0][1].backward(random(), retain_graph=True)


@event
def backward_that_runs(t: Training) -> None:
    """Run a backward whose first hook runs the forwards of all layers again, without gradients."""
    t.in_flight[0][1].register_hook(lambda _: forward_without_grad(t))
    backward(t)


@event
def microbatch_in_autocast(t: Training) -> None:
    """Run the forward and the backward of a microbatch in one autocast."""
    with autocast(t.recipe):
        forward(t)
        backward(t)


@event
def wgrad(t: Training, graph: int = 0) -> None:
    """Compute the delayed wgrads of microbatch ``graph``."""
    for number in reversed(t.chunk(0)):
        t.wgrad(number, graph, eager=False)


# These events record the results of earlier events again.
read_outputs = event(lambda t: t.see("outputs", *(out for _, out in t.run_before)), "read_outputs")
read_input_grads = event(lambda t: t.see("dgrads", *(x.grad for x, _ in t.run_before)), "read_input_grads")
read_kept_grads = event(lambda t: t.see("kept", *t.kept), "read_kept_grads")


@event
def drop_grads(t: Training) -> None:
    for parameter in t.parameters:
        parameter.grad = None


@event
def keep_grads(t: Training) -> None:
    """Store each ``.grad`` without a copy for `read_kept_grads`, and remove it from its parameter."""
    t.kept += [parameter.grad for parameter in t.parameters]
    drop_grads(t)


@event
def dummies(t: Training) -> None:
    """Run a microbatch. Record a mismatch if the ``.grad`` of a fused weight is not TE's own dummy tensor."""
    forward(t)
    backward(t)
    if t.graphed:
        addresses = {dummy.data_ptr() for dummy in te.module.base._dummy_wgrads.values()}
        weights = [weight for number in t.chunk(0) for weight in fused(t.layers[number])]
        if any(weight.grad is None or weight.grad.data_ptr() not in addresses for weight in weights):
            t.see("copied", torch.ones(1))


def last(layer: Any) -> Any:
    """Return the last parameter of a layer."""
    return [*layer.parameters()][-1]


@event
def replace_data(t: Training, number: int = 0) -> None:
    parameter = last(t.layers[number])
    parameter.data = parameter.data * 1.5


@event
def replace_fp8_data(t: Training) -> None:
    weight = t.layers[0].weight
    weight._data = torch.full_like(weight._data, 56)  # the byte 56 is 1.0 in FP8


@event
def move_weights(t: Training) -> None:
    """Move the weights to new memory, and overwrite the old memory, as offloading does."""
    for parameter in t.parameters:
        before, parameter.data = parameter.data, parameter.data.clone()
        before.zero_()


@event
def assign(t: Training, number: int = 0) -> None:
    """Replace the last parameter of a layer with ``load_state_dict(assign=True)``."""
    layer = t.layers[number]
    name, parameter = [*layer.named_parameters()][-1]
    layer.load_state_dict({name: parameter.detach() * 1.5}, strict=False, assign=True)
    of_framework = {key: value for key, value in vars(parameter).items() if "main_grad" in key}
    vars(layer.get_parameter(name)).update(of_framework)
    t.find_parameters()


@event
@torch.no_grad()
def write_in_place(t: Training, number: int = 0) -> None:
    last(t.layers[number]).mul_(1.5)


@event
def replace_main_grads(t: Training, number: int = 0) -> None:
    for parameter in t.layers[number].parameters():
        if hasattr(parameter, "main_grad"):
            parameter.main_grad = parameter.main_grad.clone()


@event
def zero_main_grads(t: Training) -> None:
    for parameter in t.weights:
        parameter.main_grad.zero_()


@event
def train_all(t: Training, number: int = 0) -> None:
    """Unfreeze all parameters of a layer without another capture."""
    t.layers[number].requires_grad_(True)
    t.find_parameters()


@event
def train_none(t: Training, number: int = 0) -> None:
    """Freeze all parameters of a layer without another capture."""
    t.layers[number].requires_grad_(False)


@event
def add_module(t: Training) -> None:
    t.layers[0].append(linear())
    t.find_parameters()


@event
def replace_module(t: Training) -> None:
    """Replace a submodule of a captured module, as adapters do."""
    t.layers[0][-1] = linear()
    t.find_parameters()


@event
def continue_with_a_copy(t: Training) -> None:
    """Replace the layers with copies that have one changed parameter, as programs with averaged weights do."""
    t.layers = copy.deepcopy(t.layers)
    t.calls = [[layer] * t.microbatches for layer in t.layers]
    t.find_parameters()
    write_in_place(t)
