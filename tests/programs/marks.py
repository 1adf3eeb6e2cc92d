"""Programs whose FP8 weights or fused wgrads depend on the flag ``is_first_microbatch``.

The flag is an attribute of a module or an argument of its forward.
"""

from __future__ import annotations

import contextlib
import itertools
from functools import partial

from tests.programs import PROGRAMS
from tests.support.training import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, linear, random, te, torch

RECIPES = {None: None, "delayed": DelayedScaling, "current": Float8CurrentScaling, "block": Float8BlockScaling}
FLAGS = (False, True)


def options_of(name):
    return {"enabled": name is not None, "recipe": name and RECIPES[name]()}


class Marked(torch.nn.Module):
    """A module that passes its flag to a projection, and then clears the flag.

    With ``by_class``, the flag belongs to the class, and the forward does not clear it.
    """

    is_first_microbatch = False

    def __init__(self, by_class):
        super().__init__()
        self.linear, self.other, self.by_class = linear(bias=False), linear(bias=False), by_class
        if not by_class:
            self.is_first_microbatch = True

    def forward(self, x):
        out = self.other(self.linear(x, is_first_microbatch=self.is_first_microbatch))
        if not self.by_class:
            self.is_first_microbatch = False
        return out


def marked_steps(by_class, capture):
    """Set the flag for first microbatches. The capture must not clear it, and `Marked.other` must cache no weights."""
    layer, options = Marked(by_class), options_of("delayed")
    inputs = random(5, 32, 32, grad=False) * torch.arange(1, 6, device="cuda").view(5, 1, 1)
    capture(layer, (inputs[0].clone().requires_grad_(),), **options)
    for _ in range(3):
        for number, x in enumerate(inputs):
            if by_class:
                Marked.is_first_microbatch = number == 0
            with te.autocast(**options):
                out = layer(x.clone().requires_grad_())
            out.backward(x)
            yield out
        if not by_class:
            layer.is_first_microbatch = True
        with torch.no_grad():
            for weight in layer.parameters():
                weight.sub_(0.01 * weight.grad.sign())
                weight.grad = None


for by_class in FLAGS:
    PROGRAMS[f"marked_steps, {by_class}"] = partial(marked_steps, by_class), "equal"


class Policy(torch.nn.Module):
    """A module that quantizes its weights only in calls with ``first=True``."""

    starts_step = True

    def __init__(self, kind):
        super().__init__()
        experts = (2,) * (kind is te.GroupedLinear)
        self.frozen = kind(*experts, 32, 32, bias=False, params_dtype=torch.bfloat16, device="cuda")
        self.splits = [[16, 16]] * len(experts)

    def forward(self, x, first=False):
        return self.frozen(x, *self.splits, is_first_microbatch=first)


class MarkedPolicy(Policy):
    """A `Policy` with a second layer, whose use of cached weights depends on the flag of the module."""

    def __init__(self, kind):
        super().__init__(kind)
        self.trained, self.is_first_microbatch = linear(), True

    def forward(self, x, first=False):
        out = self.trained(super().forward(x, first), is_first_microbatch=self.is_first_microbatch)
        self.is_first_microbatch = False
        return out


class RenamedPolicy(Policy):
    """A `Policy` whose flag has another name, ``starts_step``."""

    def forward(self, x, first=False):
        out = super().forward(x, self.starts_step)
        self.starts_step = False
        return out


def own_caches(policy, kind, warmup, capture):
    """Change the weights before each step. A graph must reuse FP8 weights if and only if eager runs do."""
    module, options, x = policy(kind).eval(), options_of("current"), random(grad=False)
    with torch.no_grad():
        if policy is not RenamedPolicy:
            with te.autocast(**options):
                module(x, first=True)
            module.is_first_microbatch = True
        capture(module, (x.clone(),), num_warmup_iters=warmup, **options)
        for step in range(2):
            module.is_first_microbatch = module.starts_step = True
            for weight in module.parameters():
                weight.mul_(-1 - step)
            with te.autocast(**options):
                yield from (module(x).clone() for _ in range(2))


KINDS = (te.Linear, te.LayerNormLinear, te.LayerNormMLP, te.GroupedLinear)
OWN = [(Policy, te.Linear, 0), *((policy, te.Linear, 3) for policy in (MarkedPolicy, RenamedPolicy))]
for policy, kind, warmup in [*((Policy, kind, 3) for kind in KINDS), *OWN]:
    PROGRAMS[f"{policy.__name__}, {kind.__name__}, {warmup}"] = partial(own_caches, policy, kind, warmup), "equal"


class Layer(torch.nn.Module):
    """A module that passes its flag to its projection. `mark` sets the flag, which most subclasses store elsewhere."""

    is_first_microbatch = False

    def __init__(self, **options):
        super().__init__()
        self.linear = linear(bias=False, **options)

    def forward(self, x):
        return self.linear(x, is_first_microbatch=self.is_first_microbatch)

    def mark(self, first):
        self.is_first_microbatch = first


class OfClass(Layer):
    def mark(self, first):
        type(self).is_first_microbatch = first


class ReadOnly(Layer):
    first = False
    is_first_microbatch = property(lambda self: self.first)

    def mark(self, first):
        self.first = first


class Property(Layer):
    first = False
    is_first_microbatch = property(lambda self: self.first, lambda self, first: vars(self).update(first=first))


class Slot(Layer):
    __slots__ = ("is_first_microbatch",)

    def __init__(self):
        super().__init__()
        self.is_first_microbatch = False


class Stored(torch.nn.Module):
    forward, mark = Layer.forward, Layer.mark

    def __init__(self):
        super().__init__()
        self.linear = linear(bias=False)
        self.__dict__["stored"] = {"is_first_microbatch": False}

    def __setattr__(self, name, value):
        self.stored.update({name: value}) if name == "is_first_microbatch" else super().__setattr__(name, value)

    def __getattr__(self, name):
        return self.stored[name] if name == "is_first_microbatch" else super().__getattr__(name)


class Clearing(Layer):
    def forward(self, x):
        y = super().forward(x)
        vars(self).pop("is_first_microbatch", None)
        return y


class ClearingClass(OfClass):
    def forward(self, x):
        y = super().forward(x)
        type(self).is_first_microbatch = False
        return y


def places_of_marks(kind, capture):
    """Evaluate a module after a capture, which must restore the flag in the place that stores it."""
    layer, options = kind().eval(), options_of("current")
    with torch.no_grad():
        x = random(16, 32, grad=False)
        layer.mark(True)
        with te.autocast(**options):
            layer(x)
        layer.mark(False)
        capture(layer, (x.clone(),), **options)
        for _ in range(2):
            layer.linear.weight.mul_(-2)
            for microbatch in range(2):
                layer.mark(microbatch == 0)
                with te.autocast(**options):
                    yield layer(x).clone()


for kind in (OfClass, ReadOnly, Property, Slot, Stored, Clearing, ClearingClass):
    PROGRAMS[f"places_of_marks, {kind.__name__}"] = partial(places_of_marks, kind), "equal"


def overwritten_main_grad(captured, marks, capture):
    """Capture with the flag ``captured``, and train with the flags ``marks``. Only True overwrites ``main_grad``."""
    layer, x = Layer(fuse_wgrad_accumulation=True), random(16, 32)
    layer.linear.weight.main_grad = torch.zeros(32, 32, device="cuda")
    layer.is_first_microbatch = captured
    run = capture(layer, (x.detach().clone().requires_grad_(),))
    for layer.is_first_microbatch in marks:
        run(x).sum().backward()
        yield layer.linear.weight.main_grad.clone()
    layer.is_first_microbatch = False
    with torch.no_grad():
        yield run(x)


PROGRAMS["overwritten_main_grad"] = partial(overwritten_main_grad, True, [True, True]), "equal"
PROGRAMS["added main_grad"] = partial(overwritten_main_grad, False, [True, False]), "equal"
PROGRAMS["main_grad overwritten, then added"] = (
    partial(overwritten_main_grad, True, [True, False]),
    "captured with is_first_microbatch=True and is replayed with False",
)


class WithOwner(torch.nn.Module):
    """A layer that reads the flag from itself, from its submodule, or from an argument, as ``where`` selects."""

    def __init__(self, where, fused, recomputes):
        super().__init__()
        self.linear, self.recomputes = linear(bias=False, fuse_wgrad_accumulation=fused), recomputes
        self.owner = {"itself": lambda: self, "submodule": lambda: self.linear}.get(where)

    def forward(self, x, is_first_microbatch=None):
        first = self.owner().is_first_microbatch if self.owner else is_first_microbatch
        run = partial(self.linear, is_first_microbatch=first)
        return te.checkpoint(run, x) if self.recomputes else run(x)


class Outer(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, self.is_first_microbatch)


def kept_mark(name, where, fused, recomputes, count, capture, frozen=False):
    """Set the flag for the first of ``count`` microbatches. No forward clears it. The weight may be ``frozen``."""
    layer, options = WithOwner(where, fused, recomputes), options_of(name)
    module = Outer(layer) if where == "outer" else layer
    owner = module if where == "outer" else layer.owner and layer.owner()
    weight = layer.linear.weight
    weight.requires_grad_(not frozen)
    if owner:
        owner.is_first_microbatch = True
    if fused:
        weight.main_grad = torch.zeros(32, 32, device="cuda")
    number = count if fused == recomputes else 1
    order = {"_order": [1, -1] * count} if fused == recomputes else {}
    graphs = capture((module,), tuple((random(),) for _ in range(number)), **options, **order)
    weight.grad = None
    for _ in range(2):
        for microbatch, run in enumerate([*graphs] * (count // number)):
            x, keywords = random(), {} if owner else {"is_first_microbatch": microbatch == 0}
            if owner:
                owner.is_first_microbatch = microbatch == 0
            with te.autocast(**options):
                y = run(x, **keywords)
            y.float().square().mean().backward()
            yield from (y, x.grad)
        if frozen:
            continue
        grad = weight.main_grad if fused else weight.grad
        yield grad.clone()
        with torch.no_grad():
            weight -= grad.to(weight.dtype)
            if count > 1 or not fused or not owner:  # otherwise each microbatch overwrites main_grad
                grad.zero_()


PLACES = [*itertools.product((None, "delayed"), ("itself", "submodule", "outer", "keyword")), ("current", "itself")]
for (name, where), fused, recomputes, count in itertools.product(PLACES, FLAGS, FLAGS, (1, 3)):
    is_marked = where != "keyword"
    raises = count == 3 and (fused if is_marked else name == "delayed")
    case = name, where, fused, recomputes, count
    PROGRAMS[f"kept_mark, {case}"] = partial(kept_mark, *case), "is_first_microbatch" if raises else "equal"
for case in itertools.product((None, "current", "block"), ("itself", "submodule"), (True,), (False,), (1, 3)):
    PROGRAMS[f"kept_mark of a frozen weight, {case}"] = partial(kept_mark, *case, frozen=True), "equal"


class Reusing(torch.nn.Module):
    """A layer with a frozen weight that is quantized only once. If ``fails`` is True, a capture raises an error."""

    fails = False

    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.linear.weight.requires_grad_(False)

    def forward(self, x):
        y = self.linear(x, is_first_microbatch=False)
        if self.fails and torch.cuda.is_current_stream_capturing():
            raise ZeroDivisionError
        return y


def reused_weights(name, runs_before, loads, fails, capture):
    """Train layers whose frozen weights or scales change after the capture, although the FP8 weights are reused."""
    options, layers = options_of(name), (Reusing(), Reusing())
    for layer in layers if runs_before else ():
        with torch.no_grad(), te.autocast(**options):
            layer(random())
    for layer in layers:
        layer.fails = fails
        with contextlib.suppress(ZeroDivisionError):
            capture(layer, (random(),), **options)
        layer.fails = False
    if loads:
        for layer in layers:
            layer.linear.weight.data.mul_(-3)
    torch.manual_seed(2)
    for _ in range(3):
        x = y = random()
        for layer in layers:
            with te.autocast(**options):  # the first autocast updates the scales of both layers
                y = layer(y)
        y.float().square().mean().backward()
        yield from (y, x.grad)


for case in itertools.product(("delayed", "current", "block"), FLAGS, FLAGS, FLAGS):
    PROGRAMS[f"reused_weights, {case}"] = partial(reused_weights, *case), "equal"
