"""Callables other than a single module with one output."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformer_engine.pytorch as te

from .driver.comparison import error
from .driver.setting import HIDDEN, random

OPTIONS: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda"}
MODULES = 8


class Shuffled(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """Projections that delay their wgrads, in another order than the one in which they were made."""

    def __init__(self) -> None:
        super().__init__()
        options = {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True, **OPTIONS}
        made = [te.Linear(HIDDEN, HIDDEN, **options) for _ in range(MODULES)]
        order = torch.randperm(MODULES, generator=torch.Generator().manual_seed(3)).tolist()
        self.layers = torch.nn.ModuleList(made[number] for number in order)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def hook_order() -> dict[str, Any]:
    """Whether the wgrad hooks of a callable's modules are run in the order of their forwards (else an error of 1.0).

    Where their order follows from addresses in memory, it is right by chance once in 40,000 times.
    """
    block = Shuffled()
    found: list[int] = []
    for number, layer in enumerate(block.layers):
        layer.weight.main_grad = torch.zeros(HIDDEN, HIDDEN, device="cuda")
        layer.weight.grad_added_to_main_grad = False
        layer.register_wgrad_accumulation_and_reduce_hooks(lambda number=number: found.append(number))
    run = te.make_graphed_callables(block, (random().requires_grad_(),), allow_unused_input=True)
    out = run(random().requires_grad_())
    out.backward(torch.ones_like(out))
    found.clear()
    run.backward_dw()
    return {"errors": {"order": [float(found != list(range(MODULES)))]}, "order": list(found)}


DTYPES = (
    *("float64", "float16", "complex64", "complex128", "bool", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
)

STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda y: y,
    "transposed": lambda y: y.t(),
    "chunk": lambda y: y.chunk(2, 1)[1],
    "steps": lambda y: y[1:, ::2],
    "expanded": lambda y: y[:, None].expand(-1, 3, -1),
    "permuted": lambda y: y.view(y.shape[0], 4, -1).permute(1, 2, 0),
    "negative": lambda y: _conjugate(y).imag,
}
"""How a callable's output lies in memory."""


def _conjugate(y: torch.Tensor) -> torch.Tensor:
    return torch.complex(y.float(), y.float() + 1).conj()


class Shaped(te.Linear):  # type: ignore[misc,unused-ignore]
    """A projection of a transposed input that returns a view of its output."""

    def __init__(self, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(HIDDEN, HIDDEN, **OPTIONS)
        self.view_of = view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.view_of(super().forward(x.t()))


class Typed(te.Linear):  # type: ignore[misc,unused-ignore]
    """A projection with an output of any dtype: a second one, of the first one's bytes, where it has no gradient."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(HIDDEN, HIDDEN, **OPTIONS)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x.t())
        if self.dtype.is_complex or (self.dtype.is_floating_point and self.dtype.itemsize > 1):
            return out.to(self.dtype)
        return out, out.detach() > 0 if self.dtype == torch.bool else out.detach().view(self.dtype)


def output_strides() -> dict[str, Any]:
    """The errors of three microbatches whose outputs and gradients have several strides, with buffers reused."""
    return {"errors": {name: _against_eager(functools.partial(Shaped, view)) for name, view in STRIDES.items()}}


def output_dtypes() -> dict[str, Any]:
    """The errors of three microbatches with outputs of each dtype that this torch has, with buffers reused."""
    dtypes = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
    makers = {name: functools.partial(Typed, dtype) for name, dtype in dtypes.items()}
    makers["conjugate"] = functools.partial(Shaped, _conjugate)
    return {"errors": {name: _against_eager(make) for name, make in makers.items()}}


def _against_eager(make: Callable[[], Any]) -> list[float]:
    eager, graphed = (_in_order(make, each) for each in (False, True))
    return [error(graphed, eager)]


def _in_order(make: Callable[[], Any], graphed: bool) -> list[torch.Tensor]:
    """Outputs and gradients of microbatches in an order of two forwards before each backward."""
    torch.manual_seed(1)
    order = [1, 1, -1, 1, -1, -1]
    module = make()
    runs: Any = [module] * 3
    if graphed:
        samples = [(_transposed(),) for _ in runs]
        options = {"sample_kwargs": [{}] * 3, "_order": order, "_num_layers_per_chunk": [1]}
        runs = te.make_graphed_callables((module,), samples, **options, _reuse_graph_input_output_buffers=True)
    torch.manual_seed(2)
    found, forwards, backwards = [], iter(runs), []
    for entry in order:
        if entry > 0:
            x = _transposed()
            outs = next(forwards)(x)
            outs = outs if isinstance(outs, tuple) else (outs,)
            found += [_values(out) for out in outs]
            backwards.append((outs[0], x))
        else:
            out, x = backwards.pop(0)
            grads = torch.autograd.grad(out, [x, module.weight], torch.randn_like(out))
            found += [_values(grad) for grad in grads]
    return found


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the values as floating-point numbers, or as bytes, which can be compared for every dtype."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    copy = torch.view_as_real(copy) if copy.is_complex() else copy
    return copy if copy.is_floating_point() and copy.dtype.itemsize > 1 else copy.view(torch.uint8)


def _transposed() -> torch.Tensor:
    return random().t().requires_grad_()
