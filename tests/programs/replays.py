"""Programs for `replay-contract`. Each replay must raise an error or compute the same numbers as eager training."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
import types
from functools import partial

import torch
import transformer_engine.pytorch as te
from torch.utils.checkpoint import checkpoint
from transformer_engine.pytorch import quantized_tensor

from tests.programs import PROGRAMS

H = 32


def x(**options):
    return torch.randn(16, H, device="cuda", **{"requires_grad": True, **options})


def linear(**options):
    return te.Linear(H, H, device="cuda", **options)


class Own(torch.nn.Module):
    def __init__(self, function, **attributes):
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args):
        return self.function(self, *args)


def buffered(function, buffer, **attributes):
    module = Own(function, **attributes)
    module.register_buffer("buffer", buffer)
    return module


def grads(modules, *tensors):
    tensors = [*tensors, *(p for module in modules for p in module.parameters())]
    found = [tensor.grad.clone() for tensor in tensors if tensor.grad is not None]
    for tensor in tensors:
        tensor.grad = None
    return found


def block():
    return torch.nn.Sequential(torch.nn.LayerNorm(H), torch.nn.Linear(H, H), torch.nn.GELU()).cuda()


def losses(y):
    return y.square().mean(), y[:, :4].abs().mean(), y.sin().sum()


def several_losses(capture, **options):
    options = {"retain_graph_in_backward": True, **options}
    layers = [block() for _ in range(3)]
    a, b, c = capture(tuple(layers), tuple((x(),) for _ in layers), **options)
    for _ in range(2):
        start = x()
        middle = b(a(start))
        all_losses = [middle.cos().mean(), *losses(c(middle))]
        for loss in all_losses:
            loss.backward(retain_graph=True)
            yield from grads(layers, start)


def several_losses_of(capture, function, **modules):
    module = torch.nn.Sequential(torch.nn.Linear(H, H).cuda(), Own(function, **modules))
    (graph,) = capture((module,), ((x(),),), retain_graph_in_backward=True)
    for _ in range(2):
        start = x()
        for loss in losses(graph(start)):
            loss.backward(retain_graph=True)
            yield from grads([module], start)


def several_losses_of_experts(capture, is_trained, **options):
    experts = te.GroupedLinear(2, H, H, device="cuda", **options).requires_grad_(is_trained)
    return several_losses_of(capture, lambda self, x: self.experts(x, [8, 8]), experts=experts)


class Square(torch.autograd.Function):
    """A function that keeps its saved tensors after a backward, as TE's attention does up to TE 2.14."""

    @staticmethod
    def forward(ctx, values):
        tensors, ctx.tensor_objects = quantized_tensor.prepare_for_saving(values)
        ctx.save_for_backward(*tensors)
        return values * values

    @staticmethod
    def backward(ctx, grad):
        (values,) = quantized_tensor.restore_from_saved(ctx.tensor_objects, ctx.saved_tensors)
        return 2 * values * grad


def several_losses_in_an_order(capture):
    layers = [block() for _ in range(2)]
    samples = [(x(),) for _ in range(4)]
    graphs = capture(tuple(layers), samples, _order=[1, 1, -1, -1], retain_graph_in_backward=True)
    starts = [x(), x()]
    ends = [graphs[1](graphs[0](starts[0])), graphs[3](graphs[2](starts[1]))]
    for end in ends:
        for loss in losses(end):
            loss.backward(retain_graph=True)
        yield from grads(layers, *starts)


def rotated(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


@torch.no_grad()
def angles(self, positions):
    each = positions[:, None] * torch.cat((self.buffer, self.buffer))
    return each.cos(), each.sin()


def same_positions(capture, between=lambda *_: None, function=angles):
    rope, layers, positions = buffered(function, torch.rand(H // 2)), [linear() for _ in range(3)], torch.arange(16.0)
    capture(rope, (torch.zeros(16),))
    for _ in range(2):
        start = hidden = x()
        for layer in layers:
            cos, sin = rope(positions)
            hidden = hidden + rotated(layer(hidden), cos, sin)
            between(rope, positions, cos)
        hidden.square().mean().backward()
        yield from grads(layers, start)


def same_learned_positions(capture):
    bias = Own(lambda self, p: self.e(p).sin(), e=torch.nn.Embedding(16, H))
    layers, positions = [linear(), linear()], torch.arange(16)
    capture(bias, (positions.clone(),), retain_graph_in_backward=True)
    for _ in range(2):
        start = hidden = x()
        for layer in layers:
            hidden = layer(hidden) * bias(positions)
        hidden.square().mean().backward()
        yield from grads([bias, *layers], start)


def in_flight(capture, module, *inputs):
    graphs = capture((module,), [(x(), *inputs) for _ in range(2)], _order=[1, 1, -1, -1])
    for _ in range(2):
        starts = [x(), x()]
        pairs = (graph(start, *inputs) for graph, start in zip(graphs, starts, strict=True))
        products = [(a * b).square().mean() for a, b in pairs]
        for product in products:
            product.backward()
        yield from grads([module], *starts)


def returned_bias(capture):
    module = te.Linear(H, H, return_bias=True, device="cuda")
    with torch.no_grad():
        module.bias.normal_()
    return in_flight(capture, module)


def returned_view(capture):
    return in_flight(capture, Own(lambda self, x: (self.l(x), self.l.weight[:1]), l=torch.nn.Linear(H, H)))


def returned_buffer(capture):
    return in_flight(capture, buffered(lambda self, x: (self.l(x), self.buffer), x(requires_grad=False), l=linear()))


def returned_argument(capture):
    return in_flight(capture, Own(lambda self, x, y: (self.l(x), y), l=linear()), x(requires_grad=False))


def returned_constant(capture):
    constant = x(requires_grad=False)
    return in_flight(capture, Own(lambda self, x: (self.l(x), constant), l=linear()))


def returned_after_checkpoint(capture):
    first, second = linear(), buffered(lambda self, x: (self.l(x), self.buffer), torch.ones(H), l=linear())
    capture((first, second), ((x(),), (x(),)))
    for _ in range(2):
        out, buffer = second(checkpoint(first, x(), use_reentrant=False))
        (out * buffer).square().mean().backward()
        buffer.detach().mul_(0.5)
        yield second.buffer.clone()


def argument_after_checkpoint(capture):
    first, second = linear(), Own(lambda self, x, y: (self.l(x), y), l=linear())
    capture((first, second), ((x(),), (x(), x(requires_grad=False))))
    _, argument = second(checkpoint(first, x(), use_reentrant=False), x(requires_grad=False))
    second(x(), x(requires_grad=False))
    yield argument


def changed_buffer(capture):
    def function(self, x):
        self.buffer.add_(1)
        return self.l(x), self.buffer

    return in_flight(capture, buffered(function, x(requires_grad=False), l=linear()))


def returned_statistics(capture):
    norm = torch.nn.BatchNorm1d(H, momentum=1.0)  # independent of the warmup
    return in_flight(capture, Own(lambda self, x: (self.bn(x), self.bn.running_mean), bn=norm))


class Spare(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.spare, self.beside = linear(), torch.nn.Linear(H, H), torch.nn.Sequential(linear())
        self.unused, self.frozen = [torch.nn.Parameter(torch.ones(H)) for _ in range(2)]
        self.frozen.requires_grad_(False)
        self.read = torch.nn.Parameter(torch.ones(H), requires_grad=False)
        self.lists, self.of_itself = [self.read], partial(print, self)
        self.after = torch.nn.Sequential(torch.nn.Linear(H, H, bias=False).requires_grad_(False))
        self.adapters = torch.nn.ModuleList()

    def forward(self, x):
        x = self.layer(x) * self.lists[0]
        for adapter in self.adapters:
            x = adapter(x)
        return self.after[0].forward(x)


def changed(capture, change, **options):
    module = Spare()
    capture(module, (x(),), **options)
    for _ in range(3):
        start = x()
        module(start).square().sum().backward()
        yield from grads([module], start)
        change(module)


def evaluated(capture, change):
    module = Spare().eval()
    capture(module, (x(),))
    for _ in range(2):
        with torch.no_grad():
            yield module(x())
        change(module)


def setting(path, make):
    def change(module):
        *owners, name = path.split(".")
        setattr(functools.reduce(getattr, owners, module), name, make())

    return change


def parameter():
    return torch.nn.Parameter(torch.ones(H))


def tied(capture):
    module = Own(lambda self, x: self.b(self.a(x)), a=linear(), b=linear())
    module.b.weight = module.a.weight
    capture(module, (x(),))
    module.b.weight = linear().weight
    yield module(x())


class WithProperty(torch.nn.Parameter):
    main_grad = property(lambda self: self.buffers[-1], lambda self, value: None)


def accumulated(capture, change):
    layer = linear(bias=False, fuse_wgrad_accumulation=True)
    layer.weight = WithProperty(layer.weight.data)
    layer.weight.buffers = [torch.zeros(H, H)]
    capture(layer, (x(),), allow_unused_input=True)
    for _ in range(2):
        layer(x()).sum().backward()
        yield layer.weight.main_grad
        change(layer.weight)


def moved(parameter):
    parameter.data = parameter.data.clone()


def with_adapter(self, x, scale=1.0):
    return self.l(x) + scale * self.up(x)


class Adapted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.up = torch.nn.Linear(H, H), torch.nn.Linear(H, H)

    def forward(self, x):
        return self.l(x)


def copies(capture, forward=types.MethodType, copied=copy.deepcopy, again=False, later=lambda module: None):
    module = Adapted()
    module.forward = forward(with_adapter, module)
    capture(module, (x(),))
    if again:
        del module.forward
        module.forward = forward(with_adapter, module, scale=2.0)
        capture(module, (x(),))
    later(module)
    module(x())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.9)
        copied = copied(module)
        copied.l.weight.mul_(2)
        yield copied(x())
        yield copy.deepcopy(copied).eval()(x())


def added_item(capture):
    module = Own(lambda self, x: self.named["used"](x), named=torch.nn.ModuleDict({"used": linear()}))
    capture(module, (x(),))
    module.named["new"] = linear()
    yield module(x())


def mark_that_raises(capture):
    marked = type("Marked", (Own,), {"is_first_microbatch": property(lambda self: 0 / 0)})
    module = marked(lambda self, x: self.l(x), l=linear())
    capture(module, (x(),))
    yield module(x())


def loaded(module):
    return pickle.loads(pickle.dumps(module))


def inside(module):
    return copy.deepcopy(torch.nn.ModuleList([module]))[0]


def own_methods(capture):
    module = torch.nn.Linear(H, H)
    module.reset = "own"
    reduce = type(module).__reduce_ex__
    module.__reduce_ex__ = lambda protocol: (module.tags.append(1), reduce(module, protocol))[1]
    module.tags = []
    capture(module, (x(),))
    copied = copy.copy(module)
    yield torch.tensor([len(module.tags), copied.reset == "own", "__reduce_ex__" in vars(copied)])


EQUAL = {
    "several losses": several_losses,
    "several losses in an order": several_losses_in_an_order,
    "several losses of kept tensors": partial(several_losses_of, function=lambda _, x: Square.apply(x)),
    "same positions": same_positions,
    "same learned positions": same_learned_positions,
    "returned bias": returned_bias,
    "returned view": returned_view,
    "returned buffer": returned_buffer,
    "returned argument": returned_argument,
    "returned constant": returned_constant,
    "returned statistics": returned_statistics,
    "buffer returned after a checkpoint": returned_after_checkpoint,
    "argument returned after a checkpoint": argument_after_checkpoint,
    "forward removed": partial(copies, later=lambda m: delattr(m, "forward")),
    "forward replaced": partial(copies, later=lambda m: setattr(m, "forward", lambda x, run=m.forward: 2 * run(x))),
    "unused item of a ModuleDict added": added_item,
    "mark that raises": mark_that_raises,
    "method": copies,
    "function": partial(copies, forward=partial),
    "shallow": partial(copies, copied=copy.copy),
    "pickled": partial(copies, forward=partial, copied=loaded),
    "inside another": partial(copies, copied=inside),
    "captured twice": partial(copies, forward=partial, again=True),
    "own methods": own_methods,
    "property main_grad": partial(accumulated, change=lambda w: None),
    "unused parameter unfrozen": partial(changed, change=lambda m: m.frozen.requires_grad_()),
    "unused parameter frozen": partial(changed, change=lambda m: m.unused.requires_grad_(False)),
    "unused parameter replaced": partial(changed, change=setting("unused", parameter)),
    "unused frozen parameter replaced": partial(changed, change=setting("frozen", parameter)),
    "unused parameter removed": partial(changed, change=setting("unused", lambda: None)),
    "unused parameter moved": partial(changed, change=lambda m: moved(m.unused)),
    "unused module added": partial(changed, change=setting("more", linear)),
    "unused module replaced": partial(changed, change=setting("spare", linear)),
    "module added in an unused module": partial(changed, change=lambda m: m.beside.append(linear())),
    "parameter of an unused module replaced": partial(changed, change=setting("spare.bias", parameter)),
    "unused parameter replaced in an evaluation": partial(evaluated, change=setting("unused", parameter)),
}
"""Programs that must compute the same numbers with graphs and in eager training."""
Held = dataclasses.make_dataclass("Held", ["buffer"])


def changed_in_a_dataclass(capture):
    held = Held(torch.rand(H // 2))
    function = partial(lambda held, self, positions: angles(held, positions), held)
    return same_positions(capture, between=lambda *_: held.buffer.mul_(2), function=function)


INPLACE = {
    "tensor in a dataclass changed": changed_in_a_dataclass,
    "positions changed": partial(same_positions, between=lambda m, p, c: p.add_(1)),
    "buffer changed": partial(same_positions, between=lambda m, p, c: m.buffer.mul_(2)),
    "output changed": partial(same_positions, between=lambda m, p, c: c.detach().mul_(2)),
    "dropout": partial(
        same_positions, function=lambda *given: torch.nn.functional.dropout(torch.stack(angles(*given)))
    ),
    "buffer changed in the forward": changed_buffer,
}
"""Programs that raise autograd's error for a tensor that was changed in place, some of them only with graphs."""
ONE_BACKWARD = "runs one backward for each forward"
RAISES = {
    "several losses of trained experts": (partial(several_losses_of_experts, is_trained=True), ONE_BACKWARD),
    "several losses, not retained": (partial(several_losses, retain_graph_in_backward=False), "with retain_graph"),
    "parameter in a list moved": (partial(changed, change=setting("read.data", parameter)), "a parameter (read) was"),
    "parameter in a list unfrozen": (partial(changed, change=lambda m: m.read.requires_grad_()), "needed no gradient"),
    "module run by forward unfrozen": (partial(changed, change=lambda m: m.after.requires_grad_()), "no gradient"),
    "module run by forward replaced": (partial(changed, change=setting("after.0", linear)), "a module (0) was"),
    "module replaced": (partial(changed, change=setting("layer", linear)), "a module (layer) was"),
    "empty list of modules replaced": (partial(changed, change=setting("adapters", block)), "a module (adapters) was"),
    "tied parameter replaced": (tied, "a parameter (weight) was"),
    "parameter of another class moved": (partial(accumulated, change=moved), "a parameter (weight) was"),
    "property main_grad replaced": (partial(accumulated, change=lambda w: w.buffers.append(x())), "the main_grad of"),
}
"""Programs that a graph cannot compute, each with a part of the error that it must raise."""

OF_EXPERTS = {"frozen": {"is_trained": False}, "original input": {"is_trained": True, "save_original_input": True}}
RELEASED = ONE_BACKWARD if hasattr(quantized_tensor, "restore_from_func_ctx") else "equal"  # from TE 2.15 on
PROGRAMS |= {
    f"several losses of experts, {name}": (partial(several_losses_of_experts, **options), RELEASED)
    for name, options in OF_EXPERTS.items()
}
PROGRAMS |= {name: (function, "equal") for name, function in EQUAL.items()}
PROGRAMS |= {name: (function, "inplace") for name, function in INPLACE.items()}
PROGRAMS |= RAISES
