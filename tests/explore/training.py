"""What the programs of the explorer are made of: modules, captures, steps and events, eagerly or through graphs.

`tests.explore.scripts` makes the script of one program from this file: what the program does not use is left out. So
every decision here reads a field of ``program``, and modules and events are functions and classes found by their names.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import itertools
import math
import os
import pickle
import re
import sys
import tempfile
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
import transformer_engine.pytorch as te
from torch.nn.parallel import DistributedDataParallel
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker
from transformer_engine.pytorch.graph import is_graph_capturing
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.tensor.utils import cast_master_weights_to_fp8

with contextlib.suppress(ImportError):
    import te_graph_fixes  # noqa: F401  # TE_GRAPH_FIXES=off shows TE as it is

from .programs import Program

os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"
os.environ.update(NVTE_FLASH_ATTN="0", NVTE_FUSED_ATTN="0", NVTE_MASKED_SOFTMAX_FUSION="0")
os.environ.update(NVTE_UnfusedDPA_Emulate_FP8="1")
SIMULATED = torch.cuda.get_device_name().startswith("simulated")
HIDDEN, TOKENS = (32, 64) if SIMULATED else (128, 256)  # block scaling on a GPU takes multiples of 128
RATE = 0.1
OPTIONS: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cuda"}
RECIPES = {
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
}
program = Program()
tracker = CudaRNGStatesTracker()


# Modules.


def made(kind: Any, *sizes: int) -> Any:
    """What makes a module with the program's options."""
    return lambda: kind(*sizes, **OPTIONS)


linear = made(te.Linear, HIDDEN, HIDDEN)
layernorm_linear = made(te.LayerNormLinear, HIDDEN, HIDDEN)
layernorm_mlp = made(te.LayerNormMLP, HIDDEN, 2 * HIDDEN)


class Experts(te.GroupedLinear):
    """Two experts, each with half of the tokens."""

    def forward(self, x: torch.Tensor, **marks: bool) -> Any:
        return super().forward(x, [TOKENS // 2] * 2, **marks)


class Special(te.Linear):
    """A subclass, as Megatron-Core's MoE layer is one of its dense layer."""


grouped_linear = made(Experts, 2, HIDDEN, HIDDEN)
subclassed = made(Special, HIDDEN, HIDDEN)


class Sequences(torch.nn.Module):
    """For attention the tokens are those of two sequences."""

    def forward(self, x: torch.Tensor, **marks: bool) -> Any:
        return super().forward(x.reshape(-1, 2, HIDDEN), **marks).view(x.shape)


class Attention(Sequences, te.MultiheadAttention):
    """Self-attention with dropout."""


class Layer(Sequences, te.TransformerLayer):
    """Self-attention and an MLP, with dropout behind each."""


def attention() -> Any:
    return Attention(HIDDEN, 2, **options_of_attention())


def transformer_layer() -> Any:
    return Layer(HIDDEN, 2 * HIDDEN, 2, hidden_dropout=0.1, **options_of_attention())


def options_of_attention() -> dict[str, Any]:
    given = {name: value for name, value in OPTIONS.items() if name != "delay_wgrad_compute"}
    return {"attention_dropout": 0.1, "fuse_qkv_params": True, "get_rng_state_tracker": the_tracker(), **given}


def the_tracker() -> Any:
    """What TE asks for its RNG tracker."""
    return (lambda: tracker) if program.tracker else None


def operation() -> Any:
    return te.ops.Linear(HIDDEN, HIDDEN, bias=program.bias, dtype=torch.bfloat16, device="cuda")


def operations() -> Any:
    return te.ops.Sequential(operation(), operation())


def nested_operations() -> Any:
    return te.ops.Sequential(te.ops.Sequential(operation()), operation())


def torch_linear() -> Any:
    return torch.nn.Linear(HIDDEN, HIDDEN, bias=program.bias, dtype=torch.bfloat16, device="cuda")


def dropout() -> Any:
    return torch.nn.Dropout(0.25)


def sequential() -> Any:
    return torch.nn.Sequential(linear(), torch.nn.ReLU(), linear())


def nested() -> Any:
    return torch.nn.Sequential(torch.nn.Sequential(linear()), te.LayerNorm(HIDDEN, dtype=torch.bfloat16), linear())


class Block(torch.nn.Module):
    """Two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(torch.relu(self.first(x)))


class Wide(torch.nn.Sequential):
    """Biases whose gradients are copied together: those of a multiple of 256 bytes."""

    def __init__(self) -> None:
        sizes = (HIDDEN, 128, 128, HIDDEN)
        super().__init__(*(te.Linear(*each, **OPTIONS) for each in itertools.pairwise(sizes)))


class ListBlock(torch.nn.Module):
    """Projections in a `ModuleList`, made in another order than the one in which they run."""

    def __init__(self) -> None:
        super().__init__()
        made = [linear() for _ in range(4)]
        self.layers = torch.nn.ModuleList(made[number] for number in (2, 0, 3, 1))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class CallsForward(Block):
    """Calls ``forward`` of its projections, not the projections."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.second.forward(torch.relu(self.first.forward(x)))


class WithNone(Block):
    """A second output is None."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


class Signed(Block):
    """A second output is the signs of the first, which need no gradient."""

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        return out, out.detach().sign()


class SignsFirst(Signed):
    """The signs come before what they are of."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x)[::-1]


class Unused(Block):
    """One projection is not used."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(x)


class KeptInBf16(Block):
    """One projection without FP8."""

    def forward(self, x: torch.Tensor) -> Any:
        with te.autocast(enabled=False):
            x = self.first(x)
        return self.second(x)


class OwnAutocast(Block):
    """One projection in a recipe of its own."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        with autocast(program.other):
            return self.second(x)


class Adapted(Block):
    """Frozen projections with an adapter beside the first."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.adapter = torch_linear()

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x) + self.adapter(x))


class AuxiliaryLoss(torch.autograd.Function):
    """Adds the gradients of a loss to those of an output, as Megatron-Core does for the balance of experts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, torch.ones((), device=grad.device)


class Routed(Block):
    """Gates by the larger half of the scores, with a loss of their own."""

    def forward(self, x: torch.Tensor) -> Any:
        scores = self.first(x).float().softmax(-1)
        least = scores.topk(HIDDEN // 2).values[..., -1:]
        gates = (scores * (scores >= least)).to(x.dtype)
        return AuxiliaryLoss.apply(self.second(x) * gates, scores.square().sum())


def normed() -> Any:
    return torch.nn.utils.parametrizations.weight_norm(linear())


class Recomputed(Block):
    """Recomputes its activations in its backward."""

    def forward(self, x: torch.Tensor) -> Any:
        options = {"get_rng_state_tracker": the_tracker()}
        return te.checkpoint(self.second, te.checkpoint(self.first, x, **options), **options)


class Named(Block):
    """Takes a keyword argument."""

    def forward(self, x: torch.Tensor, *, offset: torch.Tensor) -> Any:
        return super().forward(x + offset)


class Structured(Block):
    """Takes a dict."""

    def forward(self, given: dict[str, torch.Tensor]) -> Any:
        return super().forward(given["x"] + given["offset"])


def fork() -> Any:
    """Draws random numbers from the tracker, where there is one."""
    return tracker.fork() if program.tracker else contextlib.nullcontext()


class DropGrads(torch.autograd.Function):
    """Dropout of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        with fork():
            return torch.nn.functional.dropout(grad, 0.25)


class Dropped(Block):
    """Dropout between the projections, of what goes forward and of what comes back."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        with fork():
            x = torch.nn.functional.dropout(x, 0.25, self.training)
        return self.second(DropGrads.apply(x))


class CoreAttention(Block):
    """Attention between the projections, whose heads are halves of a token."""

    def __init__(self) -> None:
        super().__init__()
        self.core = te.DotProductAttention(2, HIDDEN // 2, attention_dropout=0.1, get_rng_state_tracker=the_tracker())

    def forward(self, x: torch.Tensor) -> Any:
        heads = self.first(x).view(-1, 2, 2, HIDDEN // 2)
        return self.second(self.core(heads, heads, heads).view(x.shape))


class Parallel(torch.nn.Module):
    """Two projections that the ranks share, as tensor parallel with sequence parallel does."""

    def __init__(self) -> None:
        super().__init__()
        shared = {**OPTIONS, "tp_group": everybody(), "tp_size": 2, "sequence_parallel": True}
        self.first = te.LayerNormLinear(HIDDEN, HIDDEN, parallel_mode="column", **shared)
        self.second = te.Linear(HIDDEN, HIDDEN, parallel_mode="row", **shared)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x))


class Tied(torch.nn.Module):
    """A plain product with the first weight of the first layer."""

    weight: torch.Tensor

    def forward(self, x: torch.Tensor) -> Any:
        return torch.nn.functional.linear(x, self.weight)


# Training.


def connect() -> None:
    """Become one of two ranks: those of torchrun, or, on the simulator, this process and a fork of it."""
    if "RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["RANK"]))
        dist.init_process_group("nccl")
    else:
        store = dist.FileStore(tempfile.mktemp(), 2)
        rank = int(not os.fork())
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=20))


def everybody() -> Any:
    """The group of the ranks, if there are any."""
    return dist.group.WORLD if program.ranks else None


def autocast(name: str) -> Any:
    """The autocast of a recipe, by its name."""
    if name == "bf16":
        return te.autocast(enabled=False)
    if program.calibrating:
        return te.autocast(enabled=False, calibrating=True, recipe=make_recipe(name), amax_reduction_group=everybody())
    return te.autocast(enabled=True, recipe=make_recipe(name), amax_reduction_group=everybody())


def make_recipe(name: str) -> Any:
    if program.calibrating:
        return recipes.DelayedScaling(amax_history_len=3)
    if name == "bf16":
        return None
    in_fp8 = program.fp8_attention and name in ("delayed", "current")
    attention = {"fp8_dpa": True, "fp8_mha": program.fp8_mha} if in_fp8 else {}
    return RECIPES[name](**attention)


def kept_elsewhere() -> Any:
    """What autograd saves is copied, as where activations are offloaded."""
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept)


def random(scale: float = 1.0) -> torch.Tensor:
    """Values for one microbatch."""
    return scale * torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")


def sample() -> torch.Tensor:
    """An input to capture with, which draws no random numbers."""
    return torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")


def arguments(number: int, x: torch.Tensor, offset: torch.Tensor) -> tuple[Any, Any]:
    """Positional and keyword arguments of a layer."""
    if program.modules[number] == "Structured":
        return ({"x": x, "offset": offset},), {}
    return (x,), {"offset": offset} if program.modules[number] == "Named" else {}


class Training:
    """The layers of a program, what runs them, and what has been seen so far."""

    def __init__(self, graphed: bool) -> None:
        FP8GlobalStateManager.reset()
        torch.manual_seed(1)
        if program.tracker:
            seed_tracker(1)
        self.graphed = graphed
        self.recipe = program.recipe
        self.seen: dict[str, list[torch.Tensor | None]] = {}
        self.event = "made"
        self.called: list[str] = []
        OPTIONS.update(bias=program.bias, fuse_wgrad_accumulation=program.fused)
        OPTIONS["delay_wgrad_compute"] = program.delay and graphed
        with (
            torch.set_grad_enabled(not program.built_without_grad),
            te.quantized_model_init(enabled=program.fp8_params, recipe=make_recipe(program.recipe)),
        ):
            self.layers = [globals()[kind]() for kind in program.modules]
            self.extra = None
            if program.first in ("eager", "frozen", "teacher", "cached"):
                self.extra = te.Linear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16, device="cuda")
            if program.first == "plain":
                self.extra = torch_linear()
        if program.first in ("frozen", "teacher"):
            self.extra.requires_grad_(False).eval()
        self.extra_forward = getattr(self.extra, "forward", None)
        if program.modules[-1] == "Tied":
            self.layers[-1].weight = next(each for each in self.layers[0].parameters() if each.dim() == 2)
        for number in program.frozen:
            self.layers[number].requires_grad_(False)
        for number, layer in enumerate(self.layers):
            self.prepare(number, layer)
        self.chunks = max(program.order) if program.order else 1
        self.per_chunk = len(self.layers) // self.chunks
        self.microbatches = program.order.count(1) if program.order else program.microbatches
        self.forwards = [layer.forward for layer in self.layers]
        self.eager: list[list[Any]] = [[forward] * self.microbatches for forward in self.forwards]
        self.calls: list[list[Any]] = [[layer] * self.microbatches for layer in self.layers]
        self.parameters = list(dict.fromkeys(each for layer in self.layers for each in layer.parameters()))
        self.weights = {p for each in self.layers for p in fused(each)}
        modules = [module for layer in self.layers for module in layer.modules()]
        self.before_capture = {module: {name: vars(module).get(name) for name in GIVEN} for module in modules}
        if program.optimizer in ("adam", "adam of master weights"):
            master = program.optimizer == "adam of master weights"
            self.adam = te.optimizers.FusedAdam(self.parameters, master_weights=master, use_decoupled_grad=True)
        elif program.optimizer == "master weights":
            self.master = {each: each.detach().dequantize() for each in self.parameters}
        self.input = sample()
        if graphed:
            self.capture()
        for number, layer in enumerate(self.layers if program.late_hooks else ()):
            self.hook_parameters(number, layer)
        for layer in self.layers if program.module_hooks else ():
            layer.register_forward_hook(lambda *_: self.called.append("module, forward"))
            layer.register_full_backward_hook(lambda *_: self.called.append("module, backward"))
        if program.hooks == "ddp":
            self.reducing = list(map(DistributedDataParallel, self.layers))

    def prepare(self, number: int, layer: Any) -> None:
        """What a training framework gives to modules and parameters: marks, ``main_grad``, hooks."""
        if program.weights != "plain":
            for module in layer.modules():
                if isinstance(module, TransformerEngineBaseModule) and not isinstance(module, te.DotProductAttention):
                    mark(module)
        if program.fused:
            for parameter in fused(layer):
                parameter.main_grad = torch.zeros(parameter.shape, device="cuda")
                parameter.grad_added_to_main_grad = False
        if not program.late_hooks:
            self.hook_parameters(number, layer)
        if program.wgrad_hooks and self.graphed:
            for place, module in enumerate(delayed(layer)):
                module.register_wgrad_accumulation_and_reduce_hooks(
                    lambda place=place: self.called.append(f"wgrad {number} {place}")
                )

    def hook_parameters(self, number: int, layer: Any) -> None:
        for parameter in layer.parameters() if program.hooks not in ("", "ddp") else ():
            if parameter.requires_grad:
                self.hook(number, parameter)

    def hook(self, number: int, parameter: Any) -> None:
        """A hook on a parameter; its calls are noted by layer, for a layer's own order is autograd's affair."""

        def hook(each: torch.Tensor) -> Any:
            self.called.append(f"hook {number}")
            if program.hooks == "reduces":
                dist.all_reduce(parameter.grad)
            elif program.hooks == "takes":
                parameter.taken.add_(parameter.grad)  # on the stream of a capture: nothing may be freed here
                parameter.grad = None
            return each * 2 if program.hooks == "doubles" else None

        parameter.taken = torch.zeros_like(parameter)
        if program.hooks == "doubles":
            parameter.register_hook(hook)
        else:
            parameter.register_post_accumulate_grad_hook(hook)

    # Capture.

    def capture(self) -> None:
        """Make the graphs."""
        if program.inference == "first":
            self.capture_inference()
        if program.first in ("frozen", "teacher", "plain", "cached"):
            leaf = sample().requires_grad_(program.first in ("plain", "cached"))
            self.graph(self.extra, (leaf,), cache_quantized_params="cached" in (program.first, program.weights))
        if program.order:
            self.capture_order()
        elif program.together:
            samples, named = zip(*map(self.samples, range(len(self.layers))), strict=True)
            enabled = tuple(self.fp8(number) for number in range(len(self.layers)))
            self.graph(tuple(self.layers), samples, sample_kwargs=named, enabled=enabled)
        else:
            for number, layer in enumerate(self.layers):
                if number not in program.not_captured:
                    samples, named = self.samples(number)
                    part = getattr(layer, "first", layer) if program.inside else layer
                    self.graph(part, samples, sample_kwargs=named, enabled=self.fp8(number))
        if program.inference == "after":
            self.capture_inference()

    def fp8(self, number: int) -> bool:
        return self.recipe != "bf16" and number not in program.in_bf16 and not program.calibrating

    def graph(self, modules: Any, samples: Any, **options: Any) -> Any:
        if program.calibrating:
            options["calibrating"] = True
        if program.own_pool:
            options["pool"] = torch.cuda.graph_pool_handle()
        return te.make_graphed_callables(
            modules,
            samples,
            **{
                "num_warmup_iters": program.warmup,
                "allow_unused_input": True,
                "enabled": self.recipe != "bf16" and not program.calibrating,
                "recipe": make_recipe(self.recipe),
                "amax_reduction_group": everybody(),
                "cache_quantized_params": program.weights == "cached",
                **options,
            },
        )

    def samples(self, number: int) -> tuple[Any, Any]:
        """The `arguments` to capture a layer with."""
        leaf = self.input if program.same_input and not number else sample()
        if program.input_grads or number % self.per_chunk:
            leaf.requires_grad_()
        return arguments(number, leaf, sample())

    def capture_order(self) -> None:
        """Graphs of every chunk and microbatch."""
        numbers = [
            chunk * self.per_chunk + layer
            for chunk in range(self.chunks)
            for _ in range(self.microbatches)
            for layer in range(self.per_chunk)
        ]
        order, per_chunk = list(program.order), self.per_chunk
        if program.layers_as_chunks:
            numbers = [number for number in range(len(self.layers)) for _ in range(self.microbatches)]
            order = [each for entry in order for each in self.layers_of(entry)]
            per_chunk = 1
        samples, named = zip(*map(self.samples, numbers), strict=True)
        runs = self.graph(
            tuple(self.layers),
            samples if program.tuples else list(samples),
            sample_kwargs=None if program.tuples else list(named),
            enabled=tuple(self.fp8(number) for number in range(len(self.layers))),
            _order=order,
            _num_layers_per_chunk=[per_chunk] * (len(self.layers) // per_chunk),
            _reuse_graph_input_output_buffers=program.reuse,
        )
        self.calls = [[run for run, n in zip(runs, numbers, strict=True) if n == m] for m in range(len(self.layers))]

    def layers_of(self, entry: float) -> list[float]:
        """An entry of the order, once for each layer of its chunk."""
        chunk, part = abs(math.ceil(entry)) - 1, math.ceil(entry) - entry
        layers = range(chunk * self.per_chunk + 1, (chunk + 1) * self.per_chunk + 1)
        return list(layers) if entry > 0 else [-layer - part if part else -layer for layer in reversed(layers)]

    def capture_inference(self) -> None:
        """A graph of the first layer for inference, beside those for training."""
        layer = self.layers[0]
        layer.eval()
        before = {name: vars(layer).get(name) for name in GIVEN}
        with torch.no_grad():
            self.graph((layer,), ((sample(),),), enabled=self.fp8(0))
        self.infer, self.reset_inference = layer.forward, layer.reset
        give_back(layer, before)
        layer.train()

    def release(self) -> None:
        """Reset the graphs, and give the modules back what they had."""
        runs = {id(each): each for calls in self.calls for each in calls}.values()
        for graph in [*runs, *self.before_capture, self.extra]:
            if "reset" in getattr(graph, "__dict__", ()):
                graph.reset()
        for module, before in self.before_capture.items():
            give_back(module, before)
        if self.extra is not None:
            give_back(self.extra, {})
        if program.inference:
            self.reset_inference()
            self.infer = None
        self.calls = [[layer] * self.microbatches for layer in self.layers]

    # Steps.

    def see(self, what: str, *values: torch.Tensor | None) -> None:
        """Keep copies of values, to be compared."""
        kept = self.seen.setdefault(f"{self.event}: {what}", [])
        kept += [None if value is None else value.detach().clone() for value in values]

    def mark_first(self) -> None:
        if program.weights != "plain":
            for layer in self.layers:
                for module in layer.modules():
                    if hasattr(module, "is_first_microbatch"):
                        module.is_first_microbatch = True

    def layer(self, number: int, call: Any, x: torch.Tensor, microbatch: int, graphed: bool) -> torch.Tensor:
        """Run one layer."""
        given, options = arguments(number, x, x.detach() / 2)
        if program.hooks == "ddp" and call is self.layers[number]:
            call = self.reducing[number]
        if program.weights == "cached" and graphed and number not in program.not_captured:
            options["is_first_microbatch"] = microbatch == 0
        in_bf16 = number in program.in_bf16
        if program.recompute and not in_bf16:
            call = functools.partial(te.checkpoint, call, get_rng_state_tracker=the_tracker())
        with te.autocast(enabled=False) if in_bf16 else contextlib.nullcontext():
            out = call(*given, **options)
        return out[program.modules[number] == "SignsFirst"] if isinstance(out, tuple) else out

    def before(self, x: torch.Tensor, microbatch: int, calls: list[list[Any]], graphed: bool) -> torch.Tensor:
        """What runs first in the autocast."""
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

    def forward(self, x: torch.Tensor, chunk: int, microbatch: int, eager: bool = False) -> torch.Tensor:
        """Run a microbatch through the layers of a chunk."""
        calls = self.eager if eager else self.calls
        graphed = self.graphed and not eager
        layers = range(chunk * self.per_chunk, (chunk + 1) * self.per_chunk)
        given = x
        if program.sets_flag:
            FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(microbatch > 0)
        outer = {"one": self.recipe, "nested": program.other}.get(program.autocasts)
        with autocast(outer) if outer else contextlib.nullcontext():
            x = self.before(x, microbatch, calls, graphed)
            for number in layers:
                with autocast(self.recipe) if program.autocasts != "one" else contextlib.nullcontext():
                    x = self.layer(number, calls[number][microbatch], x, microbatch, graphed)
        if program.in_place:
            return x.add_(given)
        return x + given if program.residual else x

    def begin(self, eager: bool = False) -> None:
        self.mark_first()
        if program.first == "cached":  # another model, before this one
            extra = self.extra if self.graphed and not eager else self.extra_forward
            for microbatch in range(2):
                with autocast(self.recipe):
                    self.see("outputs", extra(random(), is_first_microbatch=microbatch == 0))

    def run(self, rate: float = RATE, skip: bool = False, eager: bool = False, interrupted: bool = False) -> None:
        """A step of training; with ``skip`` its gradients are thrown away, ``interrupted`` is it by an evaluation."""
        self.begin(eager)
        counts: dict[float, int] = {}
        live: dict[tuple[int, int], Any] = {}
        late: list[torch.Tensor] = []
        for entry in program.order or (1, -1) * self.microbatches:
            chunk, microbatch = abs(math.ceil(entry)) - 1, counts.get(entry, 0)
            counts[entry] = microbatch + 1
            layers = range(chunk * self.per_chunk, (chunk + 1) * self.per_chunk)
            if entry > 0:
                x, output_grad = random(len(self.seen) / 4 + 1), random(0.01)
                if program.strided:
                    x, output_grad = (each.t().contiguous().t() for each in (x, output_grad))
                if program.same_input:
                    x = self.input.detach().copy_(x)
                if program.input_grads:
                    x.requires_grad_()
                with kept_elsewhere() if program.offload else contextlib.nullcontext():
                    out = self.forward(x, chunk, microbatch, eager)
                self.see("outputs", out)
                live[chunk, microbatch] = x, out, output_grad
            elif entry % 1 == 0:
                x, out, output_grad = live.pop((chunk, microbatch))
                out.backward(output_grad)
                if program.late_reads:
                    self.see("dgrads", *late)
                    late = [x.grad] if program.input_grads else []
                elif program.input_grads:
                    self.see("dgrads", x.grad)
                if interrupted and not microbatch:
                    self.evaluation(program.other)
                if program.drops_dummies:
                    for parameter in self.weights:
                        parameter.grad = None
            if program.delay and entry < 0 and (entry % 1 or entry - 0.5 not in program.order):
                for number in reversed(layers):
                    self.wgrad(number, microbatch, eager)
        self.see("dgrads", *late)
        self.update(0.0 if skip else rate, skip)

    def wgrad(self, number: int, microbatch: int, eager: bool) -> None:
        """The delayed wgrads of a layer; those of eager training are done, and only the hooks are left to call."""
        if self.graphed and not eager:
            call = self.calls[number][microbatch]
            if hasattr(call, "backward_dw"):
                call.backward_dw()
            return
        for place, module in enumerate(delayed(self.layers[number])):
            if self.graphed:
                type(module).backward_dw(module)
            elif program.wgrad_hooks:
                self.called.append(f"wgrad {number} {place}")

    def update(self, rate: float, skip: bool = False) -> None:
        """Change every parameter by its gradient."""
        for parameter in self.parameters:
            if parameter in self.weights:
                grad = parameter.main_grad
            elif program.hooks == "takes":
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
                parameter.main_grad.zero_()  # and not before a step: a capture must leave nothing there
        if program.optimizer in ("adam", "adam of master weights"):
            self.adam.param_groups[0]["lr"] = rate
            self.adam.step()
            self.adam.zero_grad()

    @torch.no_grad()
    def change(self, parameter: Any, grad: torch.Tensor, rate: float) -> None:
        """Change a parameter by its gradient, or let the optimizer do it."""
        if program.optimizer in ("adam", "adam of master weights"):
            parameter.decoupled_grad = grad.clone()
        elif program.optimizer == "master weights":
            self.master[parameter] -= rate * grad
            if hasattr(parameter, "quantize_"):
                with mock.patch("torch.distributed.all_reduce"):  # one rank
                    cast_master_weights_to_fp8([parameter], [self.master[parameter].view(-1)], [0], None)
            else:
                parameter.copy_(self.master[parameter])
        else:
            parameter.copy_(parameter.dequantize() - rate * grad)

    def evaluation(self, recipe: str = "", mode: Any = torch.no_grad) -> None:
        """Run without gradients and without graphs, in the recipe of training or another one."""
        self.mark_first()
        for layer in self.layers:
            layer.eval()
        kept, self.recipe = self.recipe, recipe or self.recipe
        with mode():
            self.see("outputs", self.forward(random(), 0, 0, eager=True))
        self.recipe = kept
        for layer in self.layers:
            layer.train()

    def state(self) -> None:
        """See all that later steps and a checkpoint depend on, and what the process is left with."""
        self.see("parameters", *(each.dequantize() for each in self.parameters))
        if self.recipe != "bf16":
            for layer in self.layers:
                self.see("FP8 state", *fp8_state(layer))
        self.see("RNG state", torch.cuda.get_rng_state())
        if program.tracker:
            self.see("RNG state", *(each.get_state() for each in tracker.get_states().values()))
        modules = [module for layer in self.layers for module in layer.modules()]
        left = [
            *self.called,
            f"gc {gc.isenabled()}",
            f"capturing {is_graph_capturing()} {FP8GlobalStateManager.fp8_graph_capturing()}",
            f"FP8 {FP8GlobalStateManager.is_fp8_enabled()} {FP8GlobalStateManager.is_fp8_calibration()}",
            f"grad {torch.is_grad_enabled()} {torch.is_inference_mode_enabled()}",
            *(f"{type(each).__name__} {type(each).__call__ is torch.nn.Module.__call__}" for each in modules),
            *(len(getattr(each, "_fp8_workspaces", ())) for each in modules if program.weights == "plain"),
            *(f"{each.training} {len(each._forward_hooks)} {len(each._forward_pre_hooks)}" for each in modules),
            *(f"{each.requires_grad} {len(each._backward_hooks or ())}" for each in self.parameters),
        ]
        self.called.clear()
        self.see("left behind", torch.tensor(list("\n".join(map(str, left)).encode())))


def seed_tracker(seed: int) -> None:
    tracker.reset()
    tracker.add("model-parallel-rng", seed)


GIVEN = ("forward", "backward_dw", "reset")
"""The attributes that a capture without an order gives to a module."""


def give_back(module: Any, before: dict[str, Any]) -> None:
    """Give a module the attributes back that it had before a capture."""
    for name in GIVEN:
        vars(module).pop(name, None)
        if before.get(name) is not None:
            setattr(module, name, before[name])


def mark(module: Any) -> None:
    """Let a module mark first microbatches, as Megatron-Core's do."""
    forward = module.forward

    def marked(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **{**kwargs, "is_first_microbatch": module.is_first_microbatch})
        module.is_first_microbatch = False
        return out

    module.is_first_microbatch = True
    module.forward = marked


def delayed(layer: Any) -> list[Any]:
    """The modules that can delay their wgrads, in the order in which they run."""
    return [
        module
        for module in layer.modules()
        if hasattr(module, "register_wgrad_accumulation_and_reduce_hooks") and [*module.parameters(recurse=False)]
    ]


def fused(layer: Any) -> list[Any]:
    """The parameters whose wgrads are added to ``main_grad``."""
    return [
        parameter
        for module in layer.modules()
        if getattr(module, "fuse_wgrad_accumulation", False)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 2 and parameter.requires_grad
    ]


def fp8_state(layer: Any) -> list[torch.Tensor]:
    """Scales and amax histories, in use and as a checkpoint holds them."""
    found = []
    for module in layer.modules():
        for fp8_meta in (getattr(module, "fp8_meta", None), *(getattr(module, "_fp8_metas", None) or {}).values()):
            for key in ("scaling_fwd", "scaling_bwd"):
                state: Any = (fp8_meta or {}).get(key)
                if hasattr(state, "amax_history"):
                    found += [state.scale, state.amax_history]
    for name, value in layer.state_dict().items():
        if name.endswith("_extra_state") and value is not None:
            found.append(torch.tensor([float(value.numel() > 0)]))
            held = pickle.loads(value.cpu().numpy().tobytes()) if value.numel() else {}
            for part in (held, *(held.get(mode, {}) for mode in ("forward", "backward"))):
                found += [part[key] for key in sorted(part) if key.startswith(("scale", "amax"))]
    return found


# Events.


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


def raise_in_autocast(t: Training) -> None:
    """A forward whose backward never comes, and an exception inside an autocast."""
    t.begin()
    with contextlib.suppress(ZeroDivisionError), autocast(t.recipe):
        t.forward(random(), 0, 0)
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


# Comparison.


OF_GRAPHS = "memory with graphs"
"""What eager training has nothing to compare with: runs through graphs are compared by it, with and without a fix."""


def train(graphed: bool) -> dict[str, list[torch.Tensor | None]]:
    """Run the program: all that it computed, and what it left behind, by event."""
    t = Training(graphed)
    for number, event in enumerate(program.events):
        torch.manual_seed(number + 2 + (100 * dist.get_rank() if program.ranks else 0))
        t.event = f"{number} {event}"
        globals()[event](t)
        t.state()
    if graphed:
        if SIMULATED:
            t.seen[OF_GRAPHS] = [torch.tensor([torch.cuda.memory_reserved(), torch.cuda.memory_allocated()])]
        t.release()
    t.event, seen = "released", t.seen
    if SIMULATED:
        t.calls, t.eager, t.forwards = [], [], []
        gc.collect()
        t.see("memory of graphs", torch.tensor([torch.cuda.memory_allocated()]))
    return seen


def differences(found: Any, wanted: Any) -> dict[str, float]:
    """Where two runs differ, with the largest error: the norm of the difference over the norm of what is wanted."""
    errors = {}
    for name in sorted({*wanted, *found} - {OF_GRAPHS}):
        pairs = list(zip(found.get(name, ()), wanted.get(name, ()), strict=False))
        same = len(found.get(name, ())) == len(wanted.get(name, ()))
        if not same or not all(map(equal, *zip(*pairs, strict=True))) if pairs else not same:
            errors[name] = max((error(*pair) for pair in pairs), default=1.0) if same else 1.0
    return errors


def equal(found: torch.Tensor | None, wanted: torch.Tensor | None) -> bool:
    if found is None or wanted is None:
        return found is wanted
    same = found.shape == wanted.shape and found.dtype == wanted.dtype
    return same and torch.equal(found.nan_to_num(9e9), wanted.nan_to_num(9e9))


def error(found: torch.Tensor | None, wanted: torch.Tensor | None) -> float:
    if equal(found, wanted):
        return 0.0
    if found is None or wanted is None or found.shape != wanted.shape:
        return 1.0
    result = float((found.double() - wanted.double()).norm() / wanted.double().norm())
    return result if math.isfinite(result) else math.inf


if __name__ == "__main__":
    if program.ranks:
        connect()
    eager = train(graphed=False)
    assert not differences(train(graphed=False), eager), "eager training differs from itself"
    found = differences(train(graphed=True), eager)
    if program.ranks:
        of_ranks: list[Any] = [{}, {}]
        dist.all_gather_object(of_ranks, found)
        found = {f"rank {rank}: {name}": size for rank in (0, 1) for name, size in of_ranks[rank].items()}
    for name, size in found.items():
        print(f"{name}: {size:.3g}")
    sys.exit("graphs and eager differ" if found else 0)
