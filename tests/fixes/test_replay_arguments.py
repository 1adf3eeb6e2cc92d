"""Test on the simulator that replays with arguments unlike the sample arguments are correct or raise an error."""

from __future__ import annotations

import pytest

from te_graph_fixes.patching.source import Source
from tests.support.child import run_program

pytestmark = pytest.mark.te

SETUP = """
class Module(torch.nn.Module):
    def __init__(self, forward, **options):
        super().__init__()
        self.linear, self.function = linear(**options), forward

    def forward(self, *args, **kwargs):
        return self.function(self.linear, *args, **kwargs)

def train(graphed, forward, sample, arguments, learn=True, **options):
    # Train a module and a layer behind it for three steps. Return outputs, their requires_grad, and gradients.
    torch.manual_seed(1)
    module, last = Module(forward), linear()
    module.train(learn)
    run = te.make_graphed_callables(module, sample(), allow_unused_input=True, **options) if graphed else module
    torch.manual_seed(2)
    found = []
    for step in range(3):
        args = arguments()
        outputs = run(*args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        found += [torch.tensor(o.requires_grad) for o in outputs] + [o.detach().clone() for o in outputs]
        last(sum(o.to(torch.bfloat16) for o in outputs) + args[0]).float().pow(2).mean().backward()
        for tensor in (*args, *module.parameters(), *last.parameters()):
            found.append(torch.zeros(1) if tensor.grad is None else tensor.grad.clone())
            tensor.grad = None
    return found

def refused(call, text):
    try:
        call()
    except (TypeError, ValueError) as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)
"""

WITHOUT_GRADS = """
def teacher(linear, x):
    with torch.no_grad():
        return linear(x)

def router(linear, x):
    return linear(x).float().softmax(-1) > 0.03

def state(linear, x):
    out = linear(x)
    return torch.tanh(out), out.detach()

def chosen(linear, x):
    out = linear(x)
    return out * 2, out.argmax(-1, keepdim=True), out.detach() + 1

for forward in (teacher, router, state, chosen):
    compare(train, forward, lambda: (random(),), lambda: (random(),))
for forward in (teacher, router):
    compare(train, forward, lambda: (random(),), lambda: (random(),), learn=False)
    compare(train, forward, lambda: (random(grad=False),), lambda: (random(),), learn=False)
    if NEEDS_INPUTS:
        continue
    for grad in (False, True):
        compare(train, forward, lambda: (random(grad=False),), lambda: (random(grad=grad),))

# A replay returns None for an output that is None.
module = Module(lambda linear, x: (linear(x), None, x.detach() + 1))
output, none, detached = te.make_graphed_callables(module, (random(),))(random())
assert (output.requires_grad, none, detached.requires_grad) == (True, None, False)

# In evaluation, a graph has no backward. Its outputs may need a gradient, but their backward raises an error.
module = Module(lambda linear, x: linear(x)).eval()
te.make_graphed_callables(module, (random(),))
assert "This graph has no backward" in error_of(module(random()).sum().backward)

# A capture under no_grad does not show which outputs need a gradient.
module = Module(lambda linear, x: linear(x))
with torch.no_grad():
    te.make_graphed_callables(module, (random(),), allow_unused_input=True)
assert "This graph has no backward" in error_of(module(random()).sum().backward)
"""

OWN_OUTPUT = """
def layer(linear, x, carried):
    out = linear(x) + carried
    return torch.tanh(out), out.detach()

def train(graphed):
    torch.manual_seed(1)
    module = run = Module(layer)
    if graphed:
        run = te.make_graphed_callables(module, (random(), random(grad=False)))
    torch.manual_seed(2)
    found, carried = [], torch.zeros(32, 32, dtype=torch.bfloat16, device="cuda")
    for step in range(4):
        x = random()
        out, carried = run(x, carried)
        out.float().pow(2).mean().backward()
        found += [out.detach().clone(), carried.clone(), x.grad]
    return found + [parameter.grad for parameter in module.parameters()]

compare(train)
"""

VALUES = """
import dataclasses, enum
import numpy

class Kind(enum.Enum):
    SINGLE, DOUBLE = 1, 2

@dataclasses.dataclass
class Settings:
    factor: int

class Scale:
    def __init__(self, value):
        self.value = value

def scaled(linear, x, by=None):
    by = getattr(by, "factor", getattr(by, "value", by))
    by = int(by.sum()) if isinstance(by, numpy.ndarray) else by
    return linear(x) * (1 if by is None or by is False else 2 if by is True or isinstance(by, str) else by)

def evaluate(captured, given):
    with torch.no_grad():
        module, x = Module(scaled).eval(), random()
        wanted = module(x, by=given)
        te.make_graphed_callables(module, (random(),), sample_kwargs={"by": captured})
        assert torch.equal(module(x, by=given), wanted)

one, two = torch.ones(2, 1, device="cuda", dtype=torch.bfloat16).cumsum(0)
for captured, given in (
    (False, True), (1, 2), (None, 2), (2, None), (None, "double"), (Kind.SINGLE, Kind.DOUBLE),
    (Settings(1), Settings(2)), (numpy.ones(2), numpy.ones(3)), (Scale(one), Scale(two)),
):
    refused(lambda: evaluate(captured, given), "as keyword argument 'by', and got")
held = Scale(one)
for captured, given in (
    (True, True), (2, 2), (None, None), (Kind.DOUBLE, Kind.DOUBLE), (Settings(2), Settings(2)),
    (held, held), (held, Scale(one)), (1.0, 1), ("double", "double"), (numpy.ones(2), numpy.ones(2)),
):
    evaluate(captured, given)
"""

IGNORED = """
import collections, dataclasses, enum

class Packed:
    def __init__(self, lengths):
        self.lengths, self.longest = lengths, 5

class Slots:
    __slots__ = ("lengths",)

@dataclasses.dataclass
class Settings:
    lengths: object

Kind = enum.Enum("Kind", "A")
Pair = collections.namedtuple("Pair", "a b")
module = te.make_graphed_callables(Module(lambda linear, x, **ignored: linear(x)), (random(),))
lengths = torch.ones(3, device="cuda")
slots = Slots()
slots.lengths = lengths
for value in (
    lengths, [lengths], (1, (lengths,)), {"a": lengths}, Pair(1, lengths), Packed(lengths), Packed([lengths]),
    Settings(lengths), [Packed(lengths)], slots,
):
    refused(lambda: module(random(), other=value), "a tensor but is not in sample_kwargs")
for value in (None, True, 3, "a", Kind.A, Packed(3), Settings({}), module, module.linear.weight, [], torch.bfloat16):
    module(random(), is_first_microbatch=True, other=value)

class Layer(Module):
    forward = None

    def __init__(self):
        super().__init__(None)

class Named(Layer):
    def forward(self, x, mask=None, held=None):
        return self.linear(x if mask is None else x * mask)

class PassesOn(Layer):
    def forward(self, *args, **kwargs):
        return (lambda x, mask=None: self.linear(x if mask is None else x * mask))(*args, **kwargs)

class Closure(Layer):
    def forward(self, x, mask=None):
        return (lambda: self.linear(x if mask is None else x * mask))()

class Unread(Layer):
    def forward(self, x, *, held=None, **kwargs):
        return self.linear(x)

class WithOwnCall(PassesOn):
    # As in Megatron-Core, a capture calls `__call__`, which here does not call `forward`.
    def __call__(self, x, **kwargs):
        return self.linear(x)

mask = random(grad=False)
for layer in (Named, PassesOn, Closure):
    graphed = te.make_graphed_callables(layer(), (random(),))
    refused(lambda: graphed(random(), mask=mask), "'mask', which is a tensor but is not in sample_kwargs")
    graphed = te.make_graphed_callables(layer(), (random(),), sample_kwargs={"mask": mask})
    graphed(random(), mask=mask)
    refused(lambda: graphed(random(), mask=mask, x2=mask), "'x2', which is a tensor but is not in sample_kwargs")
with warnings.catch_warnings():
    warnings.simplefilter("error")
    te.make_graphed_callables(Named(), (random(),))(random(), held=Packed(mask))
    te.make_graphed_callables(Unread(), (random(),))(random(), mask=mask, held=Packed(mask))
with warnings.catch_warnings(record=True) as messages:
    warnings.simplefilter("always")
    graphed = te.make_graphed_callables(WithOwnCall(), (random(),)).forward
    for _ in range(2):
        graphed(random(), mask=mask)
assert [str(each.message).count("got the tensor 'mask'") for each in messages] == [1]
refused(lambda: graphed(random(), mask=[mask]), "'mask', which holds a tensor")
graphed = te.make_graphed_callables(WithOwnCall(), (random(),), sample_kwargs={"mask": mask}).forward
refused(lambda: graphed(random(), mask=mask, context=mask), "'context', which is a tensor")
"""

STRUCTURES = """
import collections
Pair = collections.namedtuple("Pair", "a b")

def total(linear, x, pair):
    a, b = pair.values() if isinstance(pair, dict) else pair
    return linear(x) + 2 * a + b

x, a, b = (random() for _ in range(3))
for sample in ((random(), random()), [random(), random()]):
    module = Module(total)
    wanted = module(x, (a, b))
    te.make_graphed_callables(module, (random(),), sample_kwargs={"pair": sample})
    for pair in ((a, b), [a, b], Pair(a, b), collections.deque((a, b))):
        assert torch.equal(module(x, pair=pair), wanted)
    for pair in ({"a": a, "b": b}, ((a, b),), (a, (b,))):
        refused(lambda: module(x, pair=pair), "was captured for arguments with the structure")
module = Module(total)
wanted = module(x, (a, b))
te.make_graphed_callables(module, (random(),), sample_kwargs={"pair": {"a": random(), "b": random()}})
assert torch.equal(module(x, pair=collections.OrderedDict(a=a, b=b)), wanted)
for pair in ({"b": b, "a": a}, (a, b), {"a": a, "c": b}):
    refused(lambda: module(x, pair=pair), "was captured for arguments with the structure")
"""

DELAYED = """
def train(graphed, count, sample_needs_grad, needs_grad):
    torch.manual_seed(1)
    layers = [linear(bias=False, delay_wgrad_compute=True) for _ in range(count)]
    module = run = torch.nn.Sequential(*layers)
    if graphed:
        run, = te.make_graphed_callables((module,), ((random(grad=sample_needs_grad),),), allow_unused_input=True)
    torch.manual_seed(2)
    found = []
    for grad in needs_grad:
        x = random(grad=grad)
        out = run(x)
        out.backward(random(grad=False))
        for backward_dw in [run.backward_dw] if graphed else [layer.backward_dw for layer in layers]:
            backward_dw()
        found += [out.detach().clone()] + ([x.grad] if grad else [])
        for layer in layers:
            found.append(layer.weight.grad.clone())
            layer.weight.grad = None
    return found

for arguments in ((1, True, (True, False)), (2, True, (True, False, True)), (1, False, (False, False))):
    compare(train, *arguments)
"""

ASKED = """
class Layer(torch.nn.Module):
    # The forward changes a counter, a buffer, the random state and the FP8 scales.
    def __init__(self, function):
        super().__init__()
        self.linear, self.function, self.calls = linear(), function, 0
        self.register_buffer("mean", torch.zeros(1, device="cuda"))

    def forward(self, x, other):
        self.calls += 1
        self.mean += 1
        return self.linear(self.function(torch.nn.functional.dropout(self.linear(x)), other))

def train(graphed, function, sample, others, recipe, checkpointed):
    torch.manual_seed(1)
    layer = run = Layer(function)
    if graphed:
        run, = te.make_graphed_callables(
            (layer,), ((random(4, 8, 32), sample()),), enabled=recipe is not None, recipe=recipe
        )
    layer.mean.zero_()
    torch.manual_seed(2)
    found, calls = [], layer.calls
    for other in others:
        x = random(4, 8, 32)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            call = (lambda *args: checkpoint(run, *args, use_reentrant=False)) if checkpointed else run
            out = call(x, other)
        out.float().pow(2).mean().backward()
        found += [out.detach().clone(), x.grad, torch.randn(2), torch.randn(2, device="cuda")]
        found += [layer.linear.weight.grad.clone()]
        layer.zero_grad()
        assert other.grad is None
    if graphed:
        assert layer.calls == calls
    return found if checkpointed else [*found, layer.mean]  # an eager checkpoint adds to the mean twice

def whole(grad=False):
    return random(4, 8, 1, grad=grad)

for recipe, checkpointed in ((None, False), (None, True), (DelayedScaling(amax_history_len=4), False)):
    # The module detaches an input that needs a gradient only in some replays.
    others = [whole(), whole(True), whole(True)]
    compare(train, lambda x, other: x * other.detach(), whole, others, recipe, checkpointed)
    # A mask is broadcast.
    others = [whole(), random(1, 8, 1, grad=False), random(8, 1, grad=False), random(1, grad=False)]
    compare(train, lambda x, other: x * other, whole, others, recipe, checkpointed)

refused(lambda: train(True, torch.mul, whole, [whole(), whole(True)], None, False), "and got [True, True]")
part, weight = random(1, 8, 1, grad=False), random(1)
for function in (
    lambda x, other: x * other / other.sum(), lambda x, other: x * other.size(0), lambda x, other: x * other[1],
    lambda x, other: x + 0 * other.sum(), lambda x, other: x * (weight * other),
):
    refused(lambda: train(True, function, whole, [whole(), part], None, False), "and got shapes")
refused(lambda: train(True, torch.mul, lambda: part, [part, whole()], None, False), "and got shapes")

# The output has the shape of the only input, so a broadcast would change it.
layer = te.make_graphed_callables(linear(), (random(),))
for x in (random(1, 32), random(1, 32, grad=False), random(32, 1)):
    refused(lambda: layer(x), "and got shapes")
"""

FREED = """
outputs = []

def masked(linear, x, mask):
    out = torch.relu(linear(x) * mask)  # autograd saves this output with its own node
    outputs.append(weakref.ref(out))
    return out

layer = te.make_graphed_callables(Module(masked), (random(), random(grad=False)))
outputs.clear()
layer(random(), random(1, 32, grad=False)).sum().backward()
assert outputs and not any(output() is not None for output in outputs), outputs
"""

QUANTIZED = """
def fp8_output(linear, x):
    return linear(x, fp8_output=True)

def train(graphed, recipe):
    torch.manual_seed(1)
    first, second = linear(), linear()
    if graphed:
        te.make_graphed_callables(second, (random(),), enabled=True, recipe=recipe)
    torch.manual_seed(2)
    found = []
    for step in range(3):
        with te.autocast(enabled=True, recipe=recipe):
            out = second(first(random(), fp8_output=True))
        out.float().pow(2).mean().backward()
        for layer in (first, second):
            found.append(layer.weight.grad.clone())
            layer.zero_grad()
    return found

for recipe in (DelayedScaling(), Float8CurrentScaling()):
    options = {"enabled": True, "recipe": recipe, "allow_unused_input": True}
    module = Module(fp8_output)
    refused(lambda: te.make_graphed_callables(module, (random(),), **options), "returns a quantized tensor")

@torch.no_grad()
def evaluate(graphed, recipe):
    torch.manual_seed(1)
    module = Module(fp8_output).eval()
    if graphed:
        te.make_graphed_callables(module, (random(grad=False),), enabled=True, recipe=recipe)
    torch.manual_seed(2)
    found = []
    for step in range(3):
        with te.autocast(enabled=True, recipe=recipe):
            found.append(module(random()).dequantize().clone())
    return found

for recipe in (DelayedScaling(), Float8CurrentScaling()):
    compare(evaluate, recipe)

refused(lambda: train(True, DelayedScaling()), "and got a Float8Tensor")
with te.autocast(enabled=True, recipe=recipe):
    needs_grad = linear()(random(), fp8_output=True).requires_grad
if needs_grad:  # in TE 2.14 to 2.17, the eager layer that reads an FP8 tensor computes no gradient for it
    compare(train, Float8CurrentScaling())
"""

PROGRAMS = {
    "outputs without gradients": WITHOUT_GRADS,
    "its own output": OWN_OUTPUT,
    "plain values": VALUES,
    "ignored keywords": IGNORED,
    "other containers": STRUCTURES,
    "inputs that eager training shows to be equivalent": ASKED,
    "tensors of the eager forward": FREED,
    "quantized tensors": QUANTIZED,
    "delayed wgrads of an input without a gradient": DELAYED,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_replay_is_an_eager_call_or_an_error(name: str) -> None:
    # TE before 2.12 cannot capture a callable for training if no input needs a gradient.
    needs_inputs = "torch.autograd.grad(" in Source.installed().module("transformer_engine.pytorch.graph").text
    run_program(SETUP + PROGRAMS[name].replace("NEEDS_INPUTS", str(needs_inputs)))
