"""Modules, events and ranks of the explorer's programs, in addition to the modules and events of `verify`."""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import gc
import os
import tempfile
import types
from typing import Any

import torch
import torch.distributed as dist
import transformer_engine.pytorch as te

from tests.verify.driver.events import Failing, failed_capture, recapture
from tests.verify.driver.graphs import arguments, fused
from tests.verify.driver.modules import Block, linear, module, operation, torch_linear
from tests.verify.driver.setting import (
    OPTIONS,
    RATE,
    autocast,
    hidden,
    process_group,
    program,
    random,
    sample,
    the_tracker,
)
from tests.verify.driver.training import Training, event, fp8_state


def connect() -> None:
    """Connect two ranks: the processes of torchrun or, without torchrun, this process and a fork of it."""
    if "RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["RANK"]))
        dist.init_process_group("nccl")
    else:
        store = dist.FileStore(tempfile.mktemp(), 2)
        rank = int(not os.fork())
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(minutes=5))


class Sequences(torch.nn.Module):
    """A mixin that splits the tokens of an attention module's input into two sequences."""

    def forward(self, x: torch.Tensor, **marks: bool) -> Any:
        return super().forward(x.reshape(-1, 2, hidden()), **marks).view(x.shape)


class Attention(Sequences, te.MultiheadAttention):
    """Self-attention with dropout."""


class Layer(Sequences, te.TransformerLayer):
    """Self-attention and an MLP, each followed by dropout."""


@module
def attention() -> Any:
    return Attention(hidden(), 2, **options_of_attention())


@module
def transformer_layer() -> Any:
    return Layer(hidden(), 2 * hidden(), 2, hidden_dropout=0.1, **options_of_attention())


def options_of_attention() -> dict[str, Any]:
    given = {name: value for name, value in OPTIONS.items() if name != "delay_wgrad_compute"}
    return {"attention_dropout": 0.1, "fuse_qkv_params": True, "get_rng_state_tracker": the_tracker(), **given}


@module
def operations() -> Any:
    return te.ops.Sequential(operation(), operation())


@module
def dropout() -> Any:
    return torch.nn.Dropout(0.25)


@module
class Unused(Block):
    """A block that does not use its first projection."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(x)


@module
class Counting(Block):
    """A module that counts its forwards in a buffer, and multiplies its output by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1, device="cuda", dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> Any:
        self.count += 1
        return super().forward(x) * self.count


@module
class Teacher(Block):
    """A block that computes without gradients, although its input needs a gradient."""

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x)


@module
class Router(Block):
    """A block that returns integers. Eager code computes the input of the next layer from these integers."""

    def forward(self, x: torch.Tensor) -> Any:
        return (super().forward(x).argmax(-1, keepdim=True),)

    def finish(self, chosen: torch.Tensor) -> torch.Tensor:
        return (chosen / hidden()).to(torch.bfloat16).expand(-1, hidden())


@module
class Listed(Block):
    """A block that also runs a frozen projection, which is in a list and therefore not a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = [linear().requires_grad_(False)]

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(self.frozen[0](x))


@module
class Returning(Block):
    """A block that also returns a bias (as with ``return_bias``), a buffer and its input. Eager code uses them all."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(sample()[0] / 2)
        self.register_buffer("scale", sample()[0] * 1.5)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.bias, self.scale, x

    def finish(self, out: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(out + bias) * bias * scale * torch.tanh(x)


@module
class Detached(Block):
    """A block that also returns a detached tensor. Eager code uses this tensor."""

    def forward(self, x: torch.Tensor) -> Any:
        state = self.first(x)
        return self.second(state), state.detach()

    def finish(self, out: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        assert not state.requires_grad
        return out * torch.tanh(state)


@module
class TwoPrecisions(torch.nn.Module):
    """A projection that runs twice: first in the program's recipe, then in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = linear()

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        with te.autocast(enabled=False):
            return self.first(torch.relu(x))


@module
def patched() -> Any:
    """Return a block whose ``forward`` is replaced on the instance, as adapter libraries do."""
    block = Block()
    block.forward = types.MethodType(lambda self, x: self.first(x) + self.second(x), block)
    return block


@module
def patched_inside() -> Any:
    """Return a block whose first projection has a new ``forward``, which calls the original ``forward``."""
    block = Block()
    before = block.first.forward
    block.first.forward = lambda x, **options: torch.tanh(before(2 * x, **options))
    return block


@module
class Masked(Block):
    """A block that multiplies its input by a mask, whose sample argument has all columns instead of one."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x * mask)

    def arguments(self, x: torch.Tensor, offset: torch.Tensor) -> tuple[Any, Any]:
        return (x, (offset[:, :1] > 0).to(x.dtype)), {}

    def sample_arguments(self, x: torch.Tensor, offset: torch.Tensor) -> tuple[Any, Any]:
        return (x, offset), {}


@module
class Fp8Output(Block):
    """A block with an FP8 output, which another projection takes as its input."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x), fp8_output=True)


@module
class Adapted(Block):
    """Two frozen projections, and a trained adapter parallel to the first projection."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.adapter = torch_linear()

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x) + self.adapter(x))


@module
def normed() -> Any:
    return torch.nn.utils.parametrizations.weight_norm(linear())


@module
class CoreAttention(Block):
    """A block with attention between its projections. Each head has half of the hidden size."""

    def __init__(self) -> None:
        super().__init__()
        self.core = te.DotProductAttention(2, hidden() // 2, attention_dropout=0.1, get_rng_state_tracker=the_tracker())

    def forward(self, x: torch.Tensor) -> Any:
        heads = self.first(x).view(-1, 2, 2, hidden() // 2)
        return self.second(self.core(heads, heads, heads).view(x.shape))


@module
class Parallel(torch.nn.Module):
    """Two projections split over the ranks, with tensor and sequence parallelism."""

    def __init__(self) -> None:
        super().__init__()
        shared = {**OPTIONS, "tp_group": process_group(), "tp_size": 2, "sequence_parallel": True}
        self.first = te.LayerNormLinear(hidden(), hidden(), parallel_mode="column", **shared)
        self.second = te.Linear(hidden(), hidden(), parallel_mode="row", **shared)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x))


step_at_rate_0 = event(functools.partial(Training.run, rate=0.0), "step_at_rate_0")
skipped_step = event(functools.partial(Training.run, skip=True), "skipped_step")
interrupted_step = event(functools.partial(Training.run, interrupted=True), "interrupted_step")
evaluate_in_inference_mode = event(
    functools.partial(Training.evaluation, mode=torch.inference_mode), "evaluate_in_inference_mode"
)


@event
@torch.no_grad()
def evaluate_average(t: Training) -> None:
    """Evaluate with other weights, as programs with averaged weights do, then restore the original weights."""
    kept = [each.detach().clone() for each in t.parameters]
    for each in t.parameters:
        each.copy_(each.dequantize() / 2)
    t.evaluation()
    for each, weight in zip(t.parameters, kept, strict=True):
        each.copy_(weight)


@event
def step_of_losses(t: Training) -> None:
    """Run a step with three losses, each with a backward of its own. All but the last retain autograd's graph."""
    t.begin()
    x = random().requires_grad_()
    out = t.forward(x, range(len(t.layers)), 0)
    for last in (False, False, True):
        x.grad = None
        out.backward(torch.randn_like(out), retain_graph=not last)
        t.see("dgrads", x.grad)
    t.update(RATE)


@event
def evaluate_copy(t: Training) -> None:
    """Evaluate a deep copy of the layers."""
    x = random()
    with torch.no_grad(), autocast(t.recipe):
        for layer in map(copy.deepcopy, t.layers):
            layer.eval()
            given, options = arguments(layer, x, x / 2)
            out = layer(*given, **options)
            x = layer.finish(*out) if hasattr(layer, "finish") else out
    t.see("outputs", x)


@event
def infer_in_inference_mode(t: Training) -> None:
    """Capture and run a new layer in inference mode, with cached weights."""
    layer, x = linear().eval(), random()
    with torch.inference_mode():
        if t.graphed:
            t.graph(layer, (sample(),), cache_quantized_params=True)
        for first in (True, False):
            with autocast(t.recipe):
                t.see("outputs of another", layer(x, is_first_microbatch=first))


class FailingInFp8(Failing):
    """A `Failing` block that enters an autocast of its own."""

    def forward(self, x: torch.Tensor) -> Any:
        with autocast(program.recipe):
            return super().forward(x)


@event
def failed_capture_in_fp8(t: Training) -> None:
    failed_capture(t, 0, 2, 3, kind=FailingInFp8, enabled=False)


def fail_and_keep_the_error(t: Training, layer: Failing) -> None:
    """Run a capture that fails. Its error and this frame form a cycle, which only the garbage collector frees."""
    kept = []
    try:
        t.graph((layer,), ((sample().requires_grad_(),),), num_warmup_iters=2)
    except ZeroDivisionError as error:
        kept.append(error)


@event
def failed_capture_in_garbage(t: Training) -> None:
    """Train eagerly before and after a failed capture, whose error is freed between a forward and its backward."""
    layer, before = Failing(), linear()
    t.prepare(-1, layer)
    t.prepare(-1, before)
    for fails in (False, True):
        if fails and t.graphed:
            layer.failure, layer.count = "capture forward", 0
            fail_and_keep_the_error(t, layer)
            layer.failure = ""
        t.mark_first(layer, before)
        x = random().requires_grad_()
        with autocast(t.recipe):
            out = layer(te.checkpoint(before, x))
        gc.collect()
        out.backward(torch.randn_like(out))
        t.see("outputs of another", out)
        t.see("dgrads of another", x.grad)
        t.see("FP8 state of another", *fp8_state(before), *fp8_state(layer))


@event
def nested_in_two_precisions(t: Training) -> None:
    """Capture a block and its first layer in one call, with only one of them in FP8, and run both."""
    for enabled in ((True, False), (False, True)):
        block = Block()
        t.prepare(-1, block)
        if t.graphed:
            samples = (sample().requires_grad_(),), (sample().requires_grad_(),)
            t.graph((block.first, block), samples, enabled=enabled)
        marks = {"is_first_microbatch": True} if program.weights == "cached" and t.graphed else {}
        for call, in_fp8 in zip((block, block.first), reversed(enabled), strict=True):
            t.mark_first(block)
            x = random().requires_grad_()
            with autocast(t.recipe if in_fp8 else "bf16"):
                out = call(x, **marks)
            out.backward(torch.randn_like(out))
            t.see("outputs of another", out)
            t.see("dgrads of another", x.grad)


@event
def switch_recipe(t: Training) -> None:
    """Switch between the two recipes, capture again, and run a step."""
    t.recipe = program.other if t.recipe == program.recipe else program.recipe
    recapture(t)


@event
def freeze(t: Training) -> None:
    t.layers[-1].requires_grad_(False)
    t.weights -= {*t.layers[-1].parameters()}
    recapture(t)


@event
def unfreeze(t: Training) -> None:
    t.layers[-1].requires_grad_(True)
    t.weights |= {*fused(t.layers[-1])}
    recapture(t)


@event
def raise_in_autocast(t: Training) -> None:
    """Run a forward without a backward in an autocast, and leave the autocast by an exception."""
    t.begin()
    with contextlib.suppress(ZeroDivisionError), autocast(t.recipe):
        t.forward(random(), t.chunk(0), 0)
        raise ZeroDivisionError
