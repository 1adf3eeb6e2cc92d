"""Programs about FP8 states: cached weights, autocasts inside modules, other recipes, checkpoints, failed captures."""

from __future__ import annotations

import gc
import itertools
from functools import partial

import torch
import transformer_engine.pytorch as te

from tests.programs import PROGRAMS, program
from tests.support.training import BF16, DelayedScaling, Float8BlockScaling, Float8CurrentScaling, linear, random

DELAYED = DelayedScaling(amax_history_len=4)
OUTSIDE, INSIDE = {"replay": torch.enable_grad}, {"enabled": True, "recipe": DELAYED}
"""Options of `train` for a module that is called outside of an autocast, or inside one."""
SEVERAL_AUTOCASTS = "each time in an autocast of its own"


def autocast(recipe=DELAYED):
    return te.autocast(enabled=True, recipe=recipe)


def scales(model):
    """Return the scales and amax histories of a model's modules in delayed scaling, or [] if it has none."""
    metas = [getattr(module, "fp8_meta", {}) for module in model.modules()]
    states = [meta.get(key) for meta in metas for key in ("scaling_fwd", "scaling_bwd")]
    return [part for state in states if hasattr(state, "amax_history") for part in (state.scale, state.amax_history)]


def grads(model):
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def train(capture, module, replay=autocast, **options):
    """Train for four steps, with each forward in the context ``replay()``. Yield outputs, gradients and scales."""
    run = capture(module, (random(),), **options)
    for _ in range(4):
        x = random()
        with replay():
            y = run(x)
        (y.float() ** 2).mean().backward()
        yield from (y, x.grad, *grads(module), *scales(module))
        module.zero_grad()


class Layers(torch.nn.Module):
    """Three trained projections, a frozen projection, and a ``forward`` that uses some of them."""

    def __init__(self, forward):
        super().__init__()
        self.first, self.second, self.third = linear(), linear(), linear()
        self.frozen = linear().requires_grad_(False)
        self.function = forward

    def forward(self, x):
        return self.function(self, x)


def trained(forward, options, capture):
    return train(capture, Layers(forward), **options)


def teacher_in_no_grad(self, x):
    with torch.no_grad(), autocast():
        y = self.first(x)
    return self.second(x) + y


def no_grad_in_autocast(self, x):
    with autocast(), torch.no_grad():
        y = self.first(x)
    return self.second(x) + y


def own_autocast(self, x):
    with autocast():
        y = self.first(x)
    return self.second(x) + y


def own_autocast_before_another(self, x):
    with autocast():
        y = self.first(x)
    with autocast(Float8CurrentScaling()):
        x = self.third(x)
    return self.second(x) + y


def checkpoint_in_a_checkpoint(self, x):
    return x + te.checkpoint(lambda x: self.second(te.checkpoint(self.first, x)), x)


def twice(self, x):
    for _ in range(2):
        with autocast():
            x = self.first(x)
    return x


def nested(self, x):
    with autocast():
        return twice(self, x)


def nested_and_outer(self, x):
    with autocast():
        return self.first(own_autocast_alone(self, x))


def own_autocast_alone(self, x):
    with autocast():
        return self.first(x)


def evaluated_after_it(self, x):
    y = own_autocast_alone(self, x)
    with torch.no_grad():
        z = own_autocast_alone(self, x)
    return y + z


def frozen_before_it(self, x):
    with autocast():
        y = self.frozen(x.detach())
    with autocast():
        return self.first(x) + self.frozen(y)


OWN = (teacher_in_no_grad, no_grad_in_autocast, own_autocast, own_autocast_before_another)
FORWARDS = [
    *((forward, options, "equal") for forward in OWN for options in (OUTSIDE, INSIDE)),
    (checkpoint_in_a_checkpoint, INSIDE, "has a checkpoint inside a te.checkpoint"),
    *((forward, OUTSIDE, SEVERAL_AUTOCASTS) for forward in (twice, nested, nested_and_outer)),
    # In an outer autocast, only the first module that needs a backward updates the backward scales.
    *((forward, INSIDE, SEVERAL_AUTOCASTS) for forward in (twice, nested, nested_and_outer)),
    (evaluated_after_it, INSIDE, "equal"),
    (frozen_before_it, INSIDE, "equal"),
]
for forward, options, expected in FORWARDS:
    where = "inside" if options is INSIDE else "outside"
    PROGRAMS[f"{forward.__name__}, {where}"] = partial(trained, forward, options), expected


@program
def checkpoints_with_own_copies(capture):
    """Recompute two modules. The output of the first is unused, and the second has a checkpoint of its own."""
    layers = Layers(lambda self, x: (te.checkpoint(self.second, x), x + te.checkpoint(self.mlp, x))[1])
    layers.mlp = te.LayerNormMLP(32, 32, checkpoint=True, params_dtype=torch.bfloat16, device="cuda")
    yield from train(capture, layers, allow_unused_input=True, **INSIDE)


def new_weights(recipe, capture):
    """Create the cached weight again at each eager first microbatch, as a compiled `te.Linear` (TE #3505) does."""
    layer = linear()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def eager(x, is_first_microbatch):
        if is_first_microbatch:
            layer._fp8_workspaces.clear()
        return layer(x, is_first_microbatch=is_first_microbatch)

    def step(*calls):
        for call, first in zip(calls, (True, False), strict=True):
            x = random()
            with autocast(recipe):
                out = call(x, is_first_microbatch=first)
            out.float().pow(2).mean().backward()
            yield from (out, x.grad)
        yield from grads(layer)
        optimizer.step()
        optimizer.zero_grad()

    yield from step(eager, eager)
    options = {"_order": [1, 1, -1, -1], "_num_layers_per_chunk": [1], "cache_quantized_params": True}
    first, second = capture((layer,), [(random(),), (random(),)], enabled=True, recipe=recipe, **options)
    for calls in ((first, second), (eager, second), (first, eager), (eager, eager), (first, second)):
        yield from step(*calls)


for recipe in (DelayedScaling(amax_history_len=3), Float8CurrentScaling(), Float8BlockScaling()):
    PROGRAMS[f"new_weights, {type(recipe).__name__}"] = partial(new_weights, recipe), "equal"


class Block(torch.nn.Module):
    def __init__(self, *layers, kind=""):
        super().__init__()
        self.layers, self.kind = torch.nn.ModuleList(layers), kind

    def forward(self, x):
        if self.kind == "bf16":
            with te.autocast(enabled=False):
                return self.layers[0](x)
        for layer in self.layers:
            x = te.checkpoint(layer, x) if self.kind == "checkpoint" else layer(x)
        return x


def nested_modules(kind, enabled, recipe, capture):
    """Capture, in one call, two modules and the block that contains both, each with its own ``enabled``."""
    first, second = (te.LayerNormLinear(32, 32, params_dtype=torch.bfloat16, device="cuda") for _ in range(2))
    inner = Block(second, kind=kind)
    modules = (first, inner, Block(first, inner))
    capture(modules, tuple((random(),) for _ in modules), enabled=enabled, recipe=recipe)
    for module, enable in [*zip(modules, enabled, strict=True)][::-1] * 3:
        x = random()
        with te.autocast(enabled=enable, recipe=recipe):
            out = module(x)
        out.float().pow(2).mean().backward()
        yield from (out, x.grad, *(gradient.clone() for gradient in grads(module)))
        module.zero_grad()


for kind, recipe in itertools.product(("", "bf16", "checkpoint"), (DELAYED, Float8CurrentScaling())):
    for enabled in itertools.product((True, False), repeat=3):
        name = f"nested_modules, {kind}, {enabled}, {type(recipe).__name__}"
        PROGRAMS[name] = partial(nested_modules, kind, enabled, recipe), "equal"


def module_twice(capture):
    layer = linear()
    capture((layer, layer), ((random(),), (random(),)), enabled=(True, False))
    yield from ()


PROGRAMS["module_twice"] = module_twice, "one module twice"


class Tied(torch.nn.Module):
    """A module that runs `inner` in FP8 and then in bf16. If `takes_branch` is True, it runs `branch` first."""

    def __init__(self):
        super().__init__()
        self.inner, self.branch = linear(), linear()
        self.takes_branch = True

    def forward(self, x):
        x = self.inner(self.branch(x) if self.takes_branch else x)
        with te.autocast(enabled=False):
            return self.inner(x)


def resumed(evaluates, takes_branch, capture):
    """Train with a new recipe object in each step. Evaluations in another recipe may run between the steps."""
    layer = Tied()
    with autocast():
        layer(random()).sum().backward()
    layer.zero_grad()
    layer.takes_branch = takes_branch
    run = capture(layer, (random(),), **INSIDE)
    for _ in range(3):
        x = random()
        with autocast(DelayedScaling(amax_history_len=4)):
            y = run(x)
        (y.float() ** 2).mean().backward()
        yield from (y, x.grad, *grads(layer), *scales(layer))
        layer.zero_grad()
        if evaluates:
            layer.eval()
            with torch.no_grad(), autocast(Float8CurrentScaling()):
                yield layer(x)
            layer.train()


for case in ((False, True), (True, True), (True, False)):
    PROGRAMS[f"resumed, {case}"] = partial(resumed, *case), "equal"


def tied_operation(capture):
    layer = Tied()
    layer.inner, layer.takes_branch = te.ops.Linear(32, 32, **BF16), False
    capture(layer, (random(),), **INSIDE)


PROGRAMS["tied_operation"] = tied_operation, "which removes its FP8 state"


def failed_captures(keeps_errors, capture):
    """Train before and after failed captures of a module with its own autocast. The caller may keep the errors."""

    def fail(self, x):
        y = own_autocast_alone(self, x)
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("cannot be captured")
        return y

    layer, other, kept = Layers(fail), linear(), []

    def step():
        x = random()
        with autocast():
            y = te.checkpoint(other, x)
            gc.collect()
        y = layer(y)
        y.float().pow(2).mean().backward()
        for module in (layer, other):
            yield from (y, x.grad, *grads(module), *scales(module))
            module.zero_grad()

    yield from step()
    for _ in range(4):
        try:
            capture(layer, (torch.ones(32, 32, **BF16, requires_grad=True),))
        except ValueError as error:
            kept += [error] * keeps_errors
    torch.manual_seed(2)
    for _ in range(3):
        yield from step()


for keeps in (False, True):
    PROGRAMS[f"failed_captures, {keeps}"] = partial(failed_captures, keeps), "equal"
