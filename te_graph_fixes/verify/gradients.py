"""Gradients that a graph gives to parameters: what is delivered, to whom, and which weights they were computed with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from .training import HIDDEN, TOKENS, error, make_recipe, require_recomputation

OPTIONS: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cuda"}
STEPS = 3
MICROBATCHES = 2
ORDER = (1, 1, 2, 2, 1, -2, 1, -2, 2, -1, 2, -1, -2, -2, -1, -1)
"""One of two stages, two chunks of two layers, four microbatches."""


class Marking(te.Linear):  # type: ignore[misc,unused-ignore]
    """A projection that marks first microbatches, as Megatron-Core's do."""

    is_first_microbatch: bool

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x, is_first_microbatch=self.is_first_microbatch)
        self.is_first_microbatch = False
        return out


class Recomputed(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """A projection whose activations are recomputed in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Marking(HIDDEN, HIDDEN, bias=False, **OPTIONS)

    def forward(self, x: torch.Tensor) -> Any:
        return te.checkpoint(self.inner, x)


class CallsForward(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """Calls the ``forward`` of its layers, not the layers, so that no forward hook runs."""

    def __init__(self, *layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, **marks: bool) -> torch.Tensor:
        for layer in self.layers:
            x = layer.forward(x, **marks)
        return x


class Auxiliary(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
    """Gives a gradient of one, whatever it gets."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(grad)


class WithAuxiliary(te.LayerNormLinear):  # type: ignore[misc,unused-ignore]
    """A projection whose output has a gradient of its own, as one with an auxiliary loss."""

    def forward(self, x: torch.Tensor) -> Any:
        return Auxiliary.apply(super().forward(x))


class Output(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """A plain product with a weight that another module has too."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)


def recomputed_weights(recipe: str = "fp8-current") -> dict[str, Any]:
    """Activation recompute in a graph that does not cache weights: the errors of each step.

    The graph is captured without an order, then with one, after a replay of another graph that caches its weights.
    """
    require_recomputation()
    wanted, *found = (_train_recomputed(make_recipe(recipe), capture) for capture in (None, _alone, _after_cached))
    pairs = [(step, right) for steps in found for step, right in zip(steps, wanted, strict=True)]
    return {"errors": {"steps": [error(step, right) for step, right in pairs]}}


def _alone(module: Any, recipe: Any) -> Any:
    return te.make_graphed_callables(module, (_random(),), enabled=True, recipe=recipe)


def _after_cached(module: Any, recipe: Any) -> Any:
    options = {"enabled": True, "recipe": recipe}
    other = te.Linear(HIDDEN, HIDDEN, **OPTIONS)
    other = te.make_graphed_callables(other, (_random(),), cache_quantized_params=True, **options)
    for first in (True, False):
        with te.autocast(enabled=True, recipe=recipe):
            other(_random(), is_first_microbatch=first)
    (run,) = te.make_graphed_callables((module,), ((_random(),),), _order=[1, -1], **options)
    return run


def _train_recomputed(recipe: Any, capture: Callable[[Any, Any], Any] | None) -> list[list[torch.Tensor]]:
    FP8GlobalStateManager.reset()
    torch.manual_seed(1)
    module = Recomputed()
    module.inner.is_first_microbatch = True
    weight = module.inner.weight
    run = capture(module, recipe) if capture else module
    torch.manual_seed(2)
    steps = []
    for _ in range(STEPS):
        module.inner.is_first_microbatch = True
        weight.grad = None
        found = []
        for _ in range(MICROBATCHES):
            if not capture:
                module.inner.is_first_microbatch = True
            x = _random()
            with te.autocast(enabled=True, recipe=recipe):
                out = run(x)
            out.backward(torch.randn_like(out))
            found += [out.detach().clone(), _grad(x)]
        steps.append([*found, _grad(weight)])
        with torch.no_grad():
            weight.sub_(0.1 * weight.grad)
    return steps


def tied_weight() -> dict[str, Any]:
    """A weight with fused wgrad in one graph, and without in another: the error of the other's gradients, kept."""
    wanted, found = (_train_tied(graphed) for graphed in (False, True))
    return {"errors": {"kept": [error(found, wanted)]}}


def _train_tied(graphed: bool) -> list[torch.Tensor]:
    torch.manual_seed(1)
    (layer,) = _fused(te.Linear(HIDDEN, HIDDEN, bias=False, fuse_wgrad_accumulation=True, **OPTIONS))
    weight = layer.weight
    runs: list[Any] = [layer, Output(weight)]
    if graphed:
        runs = [te.make_graphed_callables(run, (_random(),)) for run in runs]
    torch.manual_seed(2)
    kept = []
    weight.main_grad.zero_()
    for _ in range(STEPS):
        for run in runs:
            weight.grad = None
            out = run(_random())
            out.backward(torch.randn_like(out))
        kept.append(weight.grad)
    return [*(grad for grad in kept if grad is not None), weight.main_grad]


def fused_mlps(microbatches: int = 4) -> dict[str, Any]:
    """Chunks with fused wgrads whose ``.grad`` stays set from microbatch to microbatch; and the share of copies.

    ``copied`` is the share of the weights' gradients that are not TE's shared dummies, there and without an order.
    """
    torch.manual_seed(1)
    *layers, other = _fused(
        *(te.LayerNormMLP(HIDDEN, HIDDEN, fuse_wgrad_accumulation=True, **OPTIONS) for _ in range(5))
    )
    eager = [layer for layer in layers for _ in range(microbatches)]
    wanted = _train_mlps(layers, eager, microbatches)
    samples = [(_random(),) for _ in eager]
    graphed = te.make_graphed_callables(
        tuple(layers),
        samples,
        sample_kwargs=[{} for _ in samples],
        _order=list(ORDER),
        _num_layers_per_chunk=[2, 2],
        _reuse_graph_input_output_buffers=True,
    )
    # TE numbers graphs by chunk, then microbatch, then layer.
    runs = [
        graphed[(chunk * microbatches + microbatch) * 2 + layer]
        for chunk in range(2)
        for layer in range(2)
        for microbatch in range(microbatches)
    ]
    found = _train_mlps(layers, runs, microbatches)
    te.make_graphed_callables(other, (_random(),))(_random()).sum().backward()
    return {"errors": {"gradients": [error(found, wanted)], "copied": [_copied(layers), _copied([other])]}}


def _copied(layers: Sequence[Any]) -> float:
    dummies = {dummy.data_ptr() for dummy in te.module.base._dummy_wgrads.values()}
    grads = [parameter.grad for layer in layers for parameter in layer.parameters() if parameter.dim() == 2]
    return sum(grad is None or grad.data_ptr() not in dummies for grad in grads) / len(grads)


def _train_mlps(layers: Sequence[Any], runs: Sequence[Any], microbatches: int) -> list[torch.Tensor]:
    for layer in layers:
        for parameter in layer.parameters():
            parameter.main_grad.zero_()
            parameter.grad = None
    torch.manual_seed(2)
    inputs = torch.randn(2, microbatches, TOKENS, HIDDEN, **_bf16())
    output_grads = torch.randn_like(inputs)
    counts: dict[int, int] = {}
    live: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    found = []
    for entry in ORDER:
        chunk, microbatch = abs(entry) - 1, counts.get(entry, 0)
        counts[entry] = microbatch + 1
        if entry > 0:
            x = out = inputs[chunk, microbatch].clone().requires_grad_()
            for layer in (2 * chunk, 2 * chunk + 1):
                out = runs[layer * microbatches + microbatch](out)
            live[chunk, microbatch] = x, out
        else:
            x, out = live.pop((chunk, microbatch))
            out.backward(output_grads[chunk, microbatch])
            found.append(_grad(x))
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    return found + [each.main_grad.clone() if each.dim() == 2 else _grad(each) for each in parameters]


def parameter_hooks() -> dict[str, Any]:
    """Hooks of four kinds on the parameters of a graph: for each the error of what they did and kept.

    The graph is captured without an order, then with one.
    """
    errors = {}
    for kind, register in HOOKS.items():
        wanted = _train_hooked(register, graphed=False)
        errors[kind] = [error(_train_hooked(register, True, order), wanted) for order in (None, [1, -1])]
    return {"errors": errors}


def _add(parameter: Any, total: torch.Tensor) -> object:
    def add(each: Any) -> None:
        total.add_(each.grad)

    return parameter.register_post_accumulate_grad_hook(add)


def _take(parameter: Any, total: torch.Tensor) -> object:
    def take(each: Any) -> None:
        total.add_(each.grad)
        each.grad = None

    return parameter.register_post_accumulate_grad_hook(take)


def _double(parameter: Any, total: torch.Tensor) -> object:
    return parameter.register_hook(lambda grad: grad * 2)


def _of_node(parameter: Any, total: torch.Tensor) -> object:
    """As Megatron-Core's DDP does, on a stream of its own: what accumulates on the default one cannot be captured."""

    def take(*_: Any) -> None:
        total.add_(parameter.grad)
        parameter.grad = None

    with torch.cuda.stream(torch.cuda.Stream()):
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    node.register_hook(take)
    return node


HOOKS: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "adds": _add,
    "takes": _take,
    "doubles": _double,
    "of the node": _of_node,
}


def main_grads_at_capture() -> dict[str, Any]:
    """How far ``main_grad`` is after a capture from what it was before, with wgrads in the backward and delayed."""
    errors = {}
    for delayed in (False, True):
        (layer,) = _fused(
            WithAuxiliary(HIDDEN, HIDDEN, fuse_wgrad_accumulation=True, delay_wgrad_compute=delayed, **OPTIONS)
        )
        wanted = torch.randn_like(layer.weight.main_grad)
        layer.weight.main_grad.copy_(wanted)
        te.make_graphed_callables(layer, (_random(),), allow_unused_input=True)
        errors["delayed" if delayed else "backward"] = [error([layer.weight.main_grad], [wanted])]
    return {"errors": errors}


def delayed_wgrads(together: bool) -> dict[str, Any]:
    """Delayed wgrads of two layers, captured ``together`` or in a module that calls their ``forward``: their errors."""
    wanted, found = (_train_delayed(together, graphed) for graphed in (False, True))
    return {"errors": {"wgrads": [error(*pair) for pair in zip(found, wanted, strict=True)]}}


def _train_delayed(together: bool, graphed: bool) -> list[torch.Tensor]:
    torch.manual_seed(1)
    options = {"bias": False, "fuse_wgrad_accumulation": True, "delay_wgrad_compute": graphed, **OPTIONS}
    layers = _fused(*(te.LayerNormLinear(HIDDEN, HIDDEN, **options) for _ in range(2)))
    runs = layers if together else [CallsForward(*layers)]
    if graphed:
        te.make_graphed_callables(tuple(runs), tuple((_random(),) for _ in runs))
    torch.manual_seed(2)
    for layer in layers:
        layer.weight.main_grad.zero_()
    for _ in range(STEPS):
        out = _random()
        for run in runs:
            out = run(out)
        out.backward(torch.randn_like(out))
        for run in runs if graphed else ():
            run.backward_dw()
    return [layer.weight.main_grad for layer in layers]


def _train_hooked(
    register: Callable[[Any, torch.Tensor], object], graphed: bool, order: list[int] | None = None
) -> list[torch.Tensor]:
    torch.manual_seed(1)
    layer = te.LayerNormLinear(HIDDEN, HIDDEN, **OPTIONS)
    totals = [torch.zeros(parameter.shape, device="cuda") for parameter in layer.parameters()]
    held = [register(parameter, total) for parameter, total in zip(layer.parameters(), totals, strict=True)]
    (run,) = te.make_graphed_callables((layer,), ((_random(),),), _order=order) if graphed else (layer,)
    torch.manual_seed(2)
    for _ in range(STEPS):
        out = run(_random())
        out.backward(torch.randn_like(out))
    del held
    return totals + [_grad(parameter) for parameter in layer.parameters() if parameter.grad is not None]


def _fused(*layers: Any) -> list[Any]:
    """The layers, with what Megatron's DDP gives to every parameter."""
    for layer in layers:
        for parameter in layer.parameters():
            parameter.main_grad = torch.zeros(parameter.shape, device="cuda")
            parameter.grad_added_to_main_grad = False
    return list(layers)


def _bf16() -> dict[str, Any]:
    return {"dtype": torch.bfloat16, "device": "cuda"}


def _random() -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, requires_grad=True, **_bf16())


def _grad(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad.clone()
