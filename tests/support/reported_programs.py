"""Programs from reports of users. ``python -m tests.simulator -m tests.support.reported_programs`` compares each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch.utils.checkpoint import checkpoint
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

H, TOKENS, STEPS = 64, 32, 3
DELAYED, CURRENT = DelayedScaling(amax_history_len=4), Float8CurrentScaling()
PLAIN = {"dtype": torch.bfloat16, "device": "cuda"}
Capture = Callable[..., Any]
"""Captures a module, or returns it unchanged in eager training."""
Seen = Iterator[torch.Tensor | None]


def sample(grad: bool = True) -> torch.Tensor:
    return torch.randn(TOKENS, H, **PLAIN, requires_grad=grad)


def linear(**options: Any) -> Any:
    return te.Linear(H, H, params_dtype=torch.bfloat16, **options)


class Layer(torch.nn.Module):
    def __init__(self, act: Callable[..., torch.Tensor] = lambda out: out) -> None:
        super().__init__()
        self.linear, self.act = linear(), act
        self.register_buffer("state", torch.zeros(TOKENS, 1, **PLAIN))

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        return self.act(self.linear(x), **given)


def steps(module: Any, call: Any, recipe: Any = None, marks: bool = False, given: Any = lambda step: {}) -> Seen:
    """Train for three steps of two microbatches."""
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for step in range(STEPS):
        for microbatch in range(2):
            x, keywords = sample(), {"is_first_microbatch": microbatch == 0} if marks else given(step)
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                out = call(x, **keywords)
            out.float().pow(2).mean().backward()
            yield from (out, x.grad)
        yield from (parameter.grad for parameter in module.parameters())
        optimizer.step()
        optimizer.zero_grad()


def noise(capture: Capture) -> Seen:
    layer = Layer(lambda out: out + torch.randn_like(out))
    yield from steps(layer, capture(layer))


def stateful(capture: Capture) -> Seen:
    layer = Layer(lambda out: torch.sigmoid(out + layer.state.mul_(0.5).add_(out.detach().mean(1, True)).clone()))
    call = capture(layer)
    layer.state.zero_()
    yield from steps(layer, call)
    yield layer.state


def lengths_passed(capture: Capture) -> Seen:
    layer = Layer(lambda out, ends: out * (torch.arange(TOKENS, device="cuda") < ends)[:, None])
    call = capture(layer, sample_kwargs={"ends": torch.tensor(4, device="cuda")})
    yield from steps(layer, call, given=lambda step: {"ends": torch.tensor(8 * step + 1, device="cuda")})


def lengths_held(capture: Capture) -> Seen:
    ends = torch.tensor(4, device="cuda")
    layer = Layer(lambda out: out * (torch.arange(TOKENS, device="cuda") < ends)[:, None])
    call = capture(layer)

    def hold(step: int) -> dict[str, Any]:
        ends.fill_(8 * step + 1)
        return {}

    yield from steps(layer, call, given=hold)


def own_recipe(capture: Capture) -> Seen:
    def quantized(out: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=DELAYED):
            return layer.inner(out)  # type: ignore[no-any-return,operator,unused-ignore]

    layer = Layer(quantized)
    layer.inner = linear()
    yield from steps(layer, capture(layer))
    yield layer.inner.fp8_meta["scaling_fwd"].scale


def checkpointed(capture: Capture) -> Seen:
    layers = torch.nn.ModuleList([Layer(lambda out: torch.nn.functional.dropout(out, 0.2)), linear()])
    call = capture(layers[0])
    yield from steps(layers, lambda x: layers[1](checkpoint(call, x, use_reentrant=False)))


def discarded(capture: Capture) -> Seen:
    """Free the input of a graph, and recompute it before the backward."""
    layers = torch.nn.ModuleList([linear(), linear()])
    call = capture(layers[1])

    def forward(x: torch.Tensor) -> torch.Tensor:
        middle = layers[0](x)
        out: torch.Tensor = call(middle)
        size = middle.untyped_storage().nbytes()
        middle.untyped_storage().resize_(0)

        def recompute(_: torch.Tensor) -> None:
            middle.untyped_storage().resize_(size)
            with torch.no_grad():
                middle.data.copy_(layers[0](x))

        out.register_hook(recompute)
        return out

    yield from steps(layers, forward)


def freed(capture: Capture) -> Seen:
    """Free the weight after the forward, as FSDP does, and allocate it again at another address."""
    layer = linear()
    call = capture(layer)
    for _ in range(STEPS):
        out = call(sample())
        weight, storage = layer.weight.detach().clone(), layer.weight.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        taken = torch.ones(size, dtype=torch.uint8, device="cuda")
        storage.resize_(size)
        layer.weight.data.copy_(weight)
        out.float().pow(2).mean().backward()
        yield from (out, layer.weight.grad, taken)


def text_only(capture: Capture) -> Seen:
    frozen, encoder = torch.nn.Sequential(linear(), linear()).requires_grad_(False), linear()
    call = capture(frozen)
    for step in range(4):
        x = sample(grad=False)
        out = call(x if step % 2 else encoder(x))
        if out.requires_grad:
            out.float().pow(2).mean().backward()
        yield from (out, torch.tensor(out.requires_grad), encoder.weight.grad)


def overflow(capture: Capture) -> Seen:
    """Drop the output of a replay, and repeat the step eagerly."""
    layer = linear()
    yield from steps(layer, layer, DELAYED, marks=True)
    call = capture(layer, DELAYED)
    for eager in (False, True, False):
        if eager:
            with te.autocast(enabled=True, recipe=DELAYED):
                call(sample(), is_first_microbatch=True)
        yield from steps(layer, layer if eager else call, DELAYED, marks=True)
        yield layer.fp8_meta["scaling_fwd"].scale


def shared_grads(capture: Capture) -> Seen:
    """Gather FP8 weights in ``main_grad``, copy them to the parameter, and zero ``main_grad``."""
    with getattr(te, "quantized_model_init", te.fp8_model_init)(enabled=True, recipe=CURRENT):
        layer = linear(fuse_wgrad_accumulation=True, bias=False)
    buffer = layer.weight.main_grad = torch.zeros(H, H, **PLAIN)
    gathered = torch.randn(H, H, **PLAIN)
    call = capture(layer, CURRENT)
    for _ in range(STEPS):
        buffer.copy_(gathered)
        with torch.no_grad():
            layer.weight.copy_(buffer)
        buffer.zero_()
        for first in (True, False):
            x = sample()
            with te.autocast(enabled=True, recipe=CURRENT):
                out = call(x, is_first_microbatch=first)
            out.float().pow(2).mean().backward()
            yield from (out, x.grad)
        yield buffer
        gathered -= 0.1 * buffer


PROGRAMS = (
    *(noise, stateful, lengths_passed, lengths_held, own_recipe, checkpointed, discarded, freed, text_only),
    *(overflow, shared_grads),
)


def run(program: Callable[[Capture], Seen], graphed: bool) -> list[torch.Tensor | None]:
    def capture(module: Any, recipe: Any = None, **options: Any) -> Any:
        call = module
        if graphed:
            options |= {"enabled": recipe is not None, "recipe": recipe, "cache_quantized_params": recipe is not None}
            call = te.make_graphed_callables(module, (sample(),), **options)
        torch.manual_seed(2)
        return call

    FP8GlobalStateManager.reset()
    torch.manual_seed(1)
    return [tensor if tensor is None else tensor.detach().clone() for tensor in program(capture)]


def outcome(program: Callable[[Capture], Seen]) -> str:
    """Return ``equal``, the number of tensors that differ, or the error of the graph."""
    eager = run(program, graphed=False)
    try:
        pairs = list(zip(eager, run(program, graphed=True), strict=True))
    except RuntimeError as error:
        return str(error)
    differing = sum(a is not b if a is None or b is None else not torch.equal(a, b) for a, b in pairs)
    return f"{differing} of {len(pairs)} differ" if differing else "equal"


if __name__ == "__main__":
    print(json.dumps({program.__name__: outcome(program) for program in PROGRAMS}))
