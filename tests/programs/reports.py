"""Programs from users' reports of problems that are not bugs of TE's graphs (docs/symptoms.md)."""

from __future__ import annotations

from tests.programs import PROGRAMS, program
from tests.support.training import BF16, DelayedScaling, Float8CurrentScaling, checkpoint, linear, random, te, torch

H, STEPS = 32, 3
"""Both sizes of an input, and the number of optimizer steps."""
DELAYED, CURRENT = DelayedScaling(amax_history_len=4), Float8CurrentScaling()


def capture_one(capture, module, recipe=None, **options):
    fp8 = {"enabled": recipe is not None, "recipe": recipe, "cache_quantized_params": recipe is not None}
    return capture(module, (random(),), **fp8, **options)


class Layer(torch.nn.Module):
    def __init__(self, act=lambda out: out):
        super().__init__()
        self.linear, self.act = linear(), act
        self.register_buffer("state", torch.zeros(H, 1, **BF16))

    def forward(self, x, **given):
        return self.act(self.linear(x), **given)


def steps(module, call, recipe=None, marks=False, given=lambda step: {}):
    """Train for three steps of two microbatches. Yield outputs, dgrads and, after each step, parameter gradients."""
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for step in range(STEPS):
        for microbatch in range(2):
            x, keywords = random(), {"is_first_microbatch": microbatch == 0} if marks else given(step)
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                out = call(x, **keywords)
            out.float().pow(2).mean().backward()
            yield from (out, x.grad)
        yield from (parameter.grad for parameter in module.parameters())
        optimizer.step()
        optimizer.zero_grad()


@program
def noise(capture):
    """Draw random numbers in the forward."""
    layer = Layer(lambda out: out + torch.randn_like(out))
    yield from steps(layer, capture_one(capture, layer))


@program
def stateful(capture):
    """Write a buffer in each forward."""
    layer = Layer(lambda out: torch.sigmoid(out + layer.state.mul_(0.5).add_(out.detach().mean(1, True)).clone()))
    call = capture_one(capture, layer)
    layer.state.zero_()
    yield from steps(layer, call)
    yield layer.state


@program
def lengths_passed(capture):
    """Pass a new sequence length as a keyword argument in each step."""
    layer = Layer(lambda out, ends: out * (torch.arange(H, device="cuda") < ends)[:, None])
    call = capture_one(capture, layer, sample_kwargs={"ends": torch.tensor(4, device="cuda")})
    yield from steps(layer, call, given=lambda step: {"ends": torch.tensor(8 * step + 1, device="cuda")})


@program
def lengths_held(capture):
    """Write a new sequence length into a tensor that the module holds."""
    ends = torch.tensor(4, device="cuda")
    layer = Layer(lambda out: out * (torch.arange(H, device="cuda") < ends)[:, None])
    call = capture_one(capture, layer)

    def hold(step):
        ends.fill_(8 * step + 1)
        return {}

    yield from steps(layer, call, given=hold)


@program
def own_recipe(capture):
    """Run the last layer in an autocast of its own."""

    def quantized(out):
        with te.autocast(enabled=True, recipe=DELAYED):
            return layer.inner(out)

    layer = Layer(quantized)
    layer.inner = linear()
    yield from steps(layer, capture_one(capture, layer))
    yield layer.inner.fp8_meta["scaling_fwd"].scale


@program
def checkpointed(capture):
    """Recompute a captured layer with dropout in a checkpoint."""
    layers = torch.nn.ModuleList([Layer(lambda out: torch.nn.functional.dropout(out, 0.2)), linear()])
    call = capture_one(capture, layers[0])
    yield from steps(layers, lambda x: layers[1](checkpoint(call, x, use_reentrant=False)))


@program
def discarded(capture):
    """Free the input of a graph, and recompute it before the backward."""
    layers = torch.nn.ModuleList([linear(), linear()])
    call = capture_one(capture, layers[1])

    def forward(x):
        middle = layers[0](x)
        out = call(middle)
        size = middle.untyped_storage().nbytes()
        middle.untyped_storage().resize_(0)

        def recompute(_):
            middle.untyped_storage().resize_(size)
            with torch.no_grad():
                middle.data.copy_(layers[0](x))

        out.register_hook(recompute)
        return out

    yield from steps(layers, forward)


def freed(capture):
    """Free the weight after the forward, as FSDP does, and allocate it again at another address."""
    layer = linear()
    call = capture_one(capture, layer)
    for _ in range(STEPS):
        out = call(random())
        weight, storage = layer.weight.detach().clone(), layer.weight.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        taken = torch.ones(size, dtype=torch.uint8, device="cuda")
        storage.resize_(size)
        layer.weight.data.copy_(weight)
        out.float().pow(2).mean().backward()
        yield from (out, layer.weight.grad, taken)


@program
def text_only(capture):
    """Train an eager layer in front of captured frozen layers. Every second step skips the eager layer."""
    frozen, encoder = torch.nn.Sequential(linear(), linear()).requires_grad_(False), linear()
    call = capture_one(capture, frozen)
    for step in range(4):
        x = random(grad=False)
        out = call(x if step % 2 else encoder(x))
        if out.requires_grad:
            out.float().pow(2).mean().backward()
        yield from (out, torch.tensor(out.requires_grad), encoder.weight.grad)


@program
def overflow(capture):
    """Drop the output of a replay, and repeat the step eagerly."""
    layer = linear()
    yield from steps(layer, layer, DELAYED, marks=True)
    call = capture_one(capture, layer, DELAYED)
    for eager in (False, True, False):
        if eager:
            with te.autocast(enabled=True, recipe=DELAYED):
                call(random(), is_first_microbatch=True)
        yield from steps(layer, layer if eager else call, DELAYED, marks=True)
        yield layer.fp8_meta["scaling_fwd"].scale


@program
def shared_grads(capture):
    """Gather bf16 weights in ``main_grad``, copy them to the FP8 parameter, and zero ``main_grad``."""
    with getattr(te, "quantized_model_init", te.fp8_model_init)(enabled=True, recipe=CURRENT):
        layer = linear(fuse_wgrad_accumulation=True, bias=False)
    buffer = layer.weight.main_grad = torch.zeros(H, H, **BF16)
    gathered = random(grad=False)
    call = capture_one(capture, layer, CURRENT)
    for _ in range(STEPS):
        buffer.copy_(gathered)
        with torch.no_grad():
            layer.weight.copy_(buffer)
        buffer.zero_()
        for first in (True, False):
            x = random()
            with te.autocast(enabled=True, recipe=CURRENT):
                out = call(x, is_first_microbatch=first)
            out.float().pow(2).mean().backward()
            yield from (out, x.grad)
        yield buffer
        gathered -= 0.1 * buffer


PROGRAMS["freed"] = freed, "was added, replaced, moved or resized"
