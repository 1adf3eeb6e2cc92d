"""The kinds of modules that a program can name."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.module import grouped_linear as grouped_linear_of_te

from .program import Skipped
from .setting import OPTIONS, TOKENS, autocast, hidden, program, the_tracker, tracker

MODULES: dict[str, Callable[[], Any]] = {}
"""The functions that create modules, by the names that programs use."""
Make = TypeVar("Make", bound=Callable[[], Any])


def module(make: Make, name: str = "") -> Make:
    """Register a class or a function under ``name``, by default its own name, and return it."""
    MODULES[name or make.__name__] = make
    return make


def made(name: str, kind: Any, *experts: int, width: int = 1, **own: Any) -> Any:
    """Register and return a function that creates a module of class ``kind``.

    The module's second size, such as the inner size of an MLP, is ``width`` times the hidden size.
    """
    return module(lambda: kind(*experts, hidden(), width * hidden(), **OPTIONS, **own), name)


linear = made("linear", te.Linear)
layernorm_linear = made("layernorm_linear", te.LayerNormLinear)
layernorm_mlp = made("layernorm_mlp", te.LayerNormMLP, width=2)


class Experts(te.GroupedLinear):
    """Experts that all receive the same number of tokens."""

    def forward(self, x: torch.Tensor, **marks: bool) -> Any:
        return super().forward(x, [TOKENS // self.num_gemms] * self.num_gemms, **marks)


class Special(te.Linear):
    """A subclass of `te.Linear`, as the MoE layer of Megatron-Core is a subclass of the dense layer."""


UNEVEN = [TOKENS // 2, 0, TOKENS // 2]


class UnevenExperts(te.GroupedLinear):
    """Three experts, one of which receives no tokens."""

    def forward(self, x: torch.Tensor, **marks: bool) -> Any:
        return super().forward(x, UNEVEN, **marks)


class ExpertsOnGpu(te.GroupedLinear):
    """Experts that use TE's kernels for grouped tensors. Their numbers of tokens are in GPU memory."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        if not hasattr(grouped_linear_of_te._GroupedLinear, "_make_grouped_tensor"):
            raise Skipped("GroupedLinear has no kernels for grouped tensors before TransformerEngine 2.17")
        os.environ["NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM"] = "1"
        if "use_grouped_tensor" in inspect.signature(te.GroupedLinear.__init__).parameters:  # from TE 2.19 on
            options["use_grouped_tensor"] = True
        super().__init__(*sizes, **options)
        self.splits = torch.tensor(UNEVEN, device="cuda")

    def forward(self, x: torch.Tensor, **marks: bool) -> Any:
        return super().forward(x, self.splits, **marks)


class PaddedExperts(te.GroupedLinear):
    """Two experts whose numbers of tokens no FP8 recipe accepts. They pad and unpad the tokens with TE's modules."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.pad, self.unpad = te.Fp8Padding(2), te.Fp8Unpadding(2)

    def forward(self, x: torch.Tensor, **marks: bool) -> Any:
        splits = [TOKENS // 2 - 7, TOKENS // 2 + 7]
        rows, padded_splits = self.pad(x, splits)
        return self.unpad(super().forward(rows, padded_splits, **marks), splits)


grouped_linear = made("grouped_linear", Experts, 2)
uneven_experts = made("uneven_experts", UnevenExperts, 3)
experts_on_gpu = made("experts_on_gpu", ExpertsOnGpu, 3)
padded_experts = made("padded_experts", PaddedExperts, 2)
subclassed = made("subclassed", Special)


@module
def operation() -> Any:
    return te.ops.Linear(hidden(), hidden(), bias=program.bias, dtype=torch.bfloat16, device="cuda")


@module
def grouped_operation() -> Any:
    """Return an operation of `te.ops` with three experts, one of which receives no tokens."""
    kind = getattr(te.ops, "GroupedLinear", None)
    if kind is None:
        raise Skipped("te.ops has no GroupedLinear before TransformerEngine 2.13")
    on_gpu = hasattr(kind, "_fuser_forward_grouped_tensor")
    splits = torch.tensor(UNEVEN, device="cuda" if on_gpu else "cpu")

    class Grouped(te.ops.Sequential):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x, splits)

    return Grouped(kind(3, hidden(), hidden(), bias=False, dtype=torch.bfloat16, device="cuda"))


@module
def torch_linear() -> Any:
    return torch.nn.Linear(hidden(), hidden(), bias=program.bias, dtype=torch.bfloat16, device="cuda")


@module
def nested() -> Any:
    return torch.nn.Sequential(torch.nn.Sequential(linear()), te.LayerNorm(hidden(), dtype=torch.bfloat16), linear())


one_operation = module(lambda: te.ops.Sequential(operation()), "one_operation")
nested_operations = module(lambda: te.ops.Sequential(te.ops.Sequential(operation()), operation()), "nested_operations")
sequential = module(lambda: torch.nn.Sequential(linear(), torch.nn.ReLU(), linear()), "sequential")
torch_mlp = module(lambda: torch.nn.Sequential(torch_linear(), torch.nn.GELU(), torch_linear()), "torch_mlp")


@module
class Block(torch.nn.Module):
    """Two projections with a ReLU between them."""

    def __init__(self, first: Callable[[], Any] = linear, second: Callable[[], Any] = linear) -> None:
        super().__init__()
        self.first, self.second = first(), second()

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(torch.relu(self.first(x)))


@module
class Wide(torch.nn.Sequential):
    """Three projections. At least two biases have a multiple of 256 bytes, so one kernel copies their gradients."""

    def __init__(self) -> None:
        sizes = (hidden(), 128, 128, hidden())
        super().__init__(*(te.Linear(*shape, **OPTIONS) for shape in itertools.pairwise(sizes)))


special_inside = module(lambda: Block(subclassed), "SpecialInside")


@module
class ListBlock(torch.nn.Module):
    """Projections in a `ModuleList`. Their execution order differs from the order of their creation."""

    def __init__(self) -> None:
        super().__init__()
        made = [linear() for _ in range(8)]
        self.layers = torch.nn.ModuleList(made[number] for number in (2, 5, 0, 7, 3, 6, 1, 4))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


@module
class CallsForward(Block):
    """A block that calls the ``forward`` methods of its projections directly."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.second.forward(torch.relu(self.first.forward(x)))


calls_operations = module(lambda: CallsForward(operation, operation), "CallsOperations")


@module
class WithNone(Block):
    """A block with None as its second output."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


@module
class Signed(Block):
    """A block whose second output, the signs of the first output, needs no gradient."""

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        return out, out.detach().sign()


@module
class SignsFirst(Signed):
    """A block like `Signed`, with the signs as its first output."""

    main_output = 1

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x)[::-1]


@module
class KeptInBf16(Block):
    """A block that always runs its first projection in bf16."""

    def forward(self, x: torch.Tensor) -> Any:
        with te.autocast(enabled=False):
            x = self.first(x)
        return self.second(x)


@module
class OwnAutocast(Block):
    """A block that runs its second projection in an autocast of its own, in the program's second recipe."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        with autocast(program.other):
            return self.second(x)


class AuxiliaryLoss(torch.autograd.Function):
    """An identity that adds an auxiliary loss in the backward, like Megatron-Core's load-balancing loss."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, torch.ones((), device=grad.device)


@module
class Routed(Block):
    """A block that multiplies its output by the larger half of its scores and adds an auxiliary loss on the scores."""

    def forward(self, x: torch.Tensor) -> Any:
        scores = self.first(x).float().softmax(-1)
        least = scores.topk(hidden() // 2).values[..., -1:]
        gates = (scores * (scores >= least)).to(x.dtype)
        return AuxiliaryLoss.apply(self.second(x) * gates, scores.square().sum())


@module
class Recomputed(Block):
    """A block that recomputes its activations in the backward."""

    def forward(self, x: torch.Tensor) -> Any:
        options = {"get_rng_state_tracker": the_tracker()}
        return te.checkpoint(self.second, te.checkpoint(self.first, x, **options), **options)


@module
class Named(Block):
    """A block with a keyword argument."""

    def forward(self, x: torch.Tensor, *, offset: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x + offset)

    def arguments(self, x: torch.Tensor, offset: torch.Tensor) -> tuple[Any, Any]:
        return (x,), {"offset": offset}


@module
class Sum(Block):
    """A block with two input tensors."""

    def arguments(self, x: torch.Tensor, offset: torch.Tensor) -> tuple[Any, Any]:
        return (x, offset), {}

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x + 2 * y)


@module
class SumOfOne(Sum):
    """A block that receives the same tensor as both inputs."""

    def arguments(self, x: torch.Tensor, offset: torch.Tensor) -> tuple[Any, Any]:
        return (x, x), {}


@module
class Structured(Block):
    """A block with a dict as its input."""

    def forward(self, given: dict[str, torch.Tensor]) -> Any:
        return super().forward(given["x"] + given["offset"])

    def arguments(self, x: torch.Tensor, offset: torch.Tensor) -> tuple[Any, Any]:
        return ({"x": x, "offset": offset},), {}


@module
class Bare(torch.nn.Module):
    """A module without parameters. It receives the parameters of a projection as inputs, as in NeMo Automodel."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = [torch_linear()]
        self.given = dict(self.inner[0].named_parameters())

    def forward(self, x: torch.Tensor, *given: torch.Tensor) -> Any:
        return torch.func.functional_call(self.inner[0], dict(zip(self.given, given, strict=True)), (x,))

    def arguments(self, x: torch.Tensor, offset: torch.Tensor) -> tuple[Any, Any]:
        return (x, *self.given.values()), {}


def dropped(x: torch.Tensor, training: bool = True) -> torch.Tensor:
    """Apply dropout, with random numbers from the RNG tracker if there is one."""
    with tracker.fork() if program.tracker else contextlib.nullcontext():
        return torch.nn.functional.dropout(x, 0.25, training)


@module
class Dropped(Block):
    """A block with dropout between the projections, in the forward and in the backward."""

    def forward(self, x: torch.Tensor) -> Any:
        x = dropped(self.first(x), self.training)
        if x.requires_grad:
            x.register_hook(dropped)
        return self.second(x)


@module
class Tied(torch.nn.Module):
    """A layer that multiplies its input by the first layer's first weight, which both layers share."""

    weight: torch.Tensor

    def forward(self, x: torch.Tensor) -> Any:
        return torch.nn.functional.linear(x, self.weight)
