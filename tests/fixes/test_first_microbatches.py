"""Test graphs that quantize FP8 weights only at first microbatches, or never, on the simulator."""

from __future__ import annotations

import json

import pytest

from tests.support.child import require_wrong, run_program

pytestmark = pytest.mark.te

MARKED_AFTERWARDS = """
from tests.verify.driver.setting import make_recipe

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear = linear(64, bias=False)
        self.other = linear(64, bias=False)
        self.is_first_microbatch = True

    def forward(self, x):
        out = self.other(self.linear(x, is_first_microbatch=self.is_first_microbatch))
        self.is_first_microbatch = False
        return out

def train(graphed):
    layer, recipe = Layer(), make_recipe("delayed")
    x = random(5, 64, 64, grad=False) * torch.arange(1, 6, device="cuda").view(5, 1, 1)
    if graphed:
        te.make_graphed_callables(layer, (x[0].clone().requires_grad_(),), enabled=True, recipe=recipe)
    for step in range(3):
        for microbatch in x:
            with te.autocast(enabled=True, recipe=recipe):
                out = layer(microbatch.clone().requires_grad_())
            out.backward(microbatch)
            yield out
        layer.is_first_microbatch = True
        with torch.no_grad():
            for weight in layer.parameters():
                weight.sub_(0.01 * weight.grad.sign())
                weight.grad = None

compare(train)
"""


def test_marks_that_are_set_after_a_step_count_for_marked_modules_alone() -> None:
    """A capture does not consume the first mark, and a module without marks caches no weights."""
    run_program(MARKED_AFTERWARDS)


def test_without_the_fix_marks_are_lost() -> None:
    require_wrong(MARKED_AFTERWARDS, without="stale-fp8-weights")


OF_A_CLASS = (
    MARKED_AFTERWARDS.replace("        self.is_first_microbatch = True\n", "")
    .replace("        self.is_first_microbatch = False\n", "")
    .replace("def __init__", "is_first_microbatch = False\n\n    def __init__")
    .replace(
        "        for microbatch in x:\n",
        "        for number, microbatch in enumerate(x):\n            Layer.is_first_microbatch = number == 0\n",
    )
    .replace("        layer.is_first_microbatch = True\n", "")
)
"""The training loop sets the mark of the class, which is False in the capture."""


def test_a_mark_of_a_class_is_read_at_each_replay() -> None:
    run_program(OF_A_CLASS)


OWN_CACHES = """
from tests.verify.driver.comparison import error
from tests.verify.driver.setting import make_recipe

GPU = {"params_dtype": torch.bfloat16, "device": "cuda"}
KINDS = {
    "linear": lambda: linear(64, bias=False),
    "layernorm_linear": lambda: te.LayerNormLinear(64, 64, bias=False, **GPU),
    "layernorm_mlp": lambda: te.LayerNormMLP(64, 64, bias=False, **GPU),
    "grouped_linear": lambda: te.GroupedLinear(2, 64, 64, bias=False, **GPU),
}

class Policy(torch.nn.Module):
    # Its FP8 weights are those of an earlier call.
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(1)
        self.frozen, self.splits = KINDS[kind](), [[32, 32]] if kind == "grouped_linear" else []

    def forward(self, x, first=False):
        return self.frozen(x, *self.splits, is_first_microbatch=first)

class Marked(Policy):
    # A layer beside them follows the mark of the module.
    def __init__(self, kind):
        super().__init__(kind)
        self.trained, self.is_first_microbatch = KINDS["linear"](), True

    def forward(self, x, first=False):
        out = self.trained(super().forward(x, first), is_first_microbatch=self.is_first_microbatch)
        self.is_first_microbatch = False
        return out

class Renamed(Policy):
    # It says itself when a step begins, by an attribute that no one else knows.
    starts_step = True

    def forward(self, x, first=False):
        out = super().forward(x, self.starts_step)
        self.starts_step = False
        return out

def outputs(of, kind, warmup, graphed):
    policy, recipe = of(kind).eval(), make_recipe("current")
    torch.manual_seed(2)
    x = random(64, 64, grad=False)
    found = []
    with torch.no_grad():
        if of is not Renamed:
            with te.autocast(enabled=True, recipe=recipe):
                policy(x, first=True)
            policy.is_first_microbatch = True
        if graphed:
            te.make_graphed_callables(policy, (x.clone(),), num_warmup_iters=warmup, enabled=True, recipe=recipe)
        for step in range(2):
            policy.is_first_microbatch = policy.starts_step = True
            for weight in policy.parameters():
                weight.mul_(-1 - step)
            with te.autocast(enabled=True, recipe=recipe):
                found += [policy(x).clone() for microbatch in range(2)]
    return found

cases = [(Policy, kind, 3) for kind in KINDS] + [(Policy, "linear", 0), (Marked, "linear", 3), (Renamed, "linear", 3)]
print(json.dumps([error(outputs(*case, False), outputs(*case, True)) for case in cases]))
"""


def test_modules_that_keep_weights_of_an_earlier_call_keep_them_in_a_graph() -> None:
    """A module that always passes False is correct without a fix. A module with a mark, or that passes both, is not."""
    errors = json.loads(run_program(OWN_CACHES))
    assert errors == [0.0] * 7


def test_only_modules_that_always_pass_the_same_are_right_without_the_fix() -> None:
    *same, _, renamed = json.loads(run_program(OWN_CACHES, TE_GRAPH_FIXES="off"))
    assert same == [0.0] * 5
    assert renamed > 1


FILLS = """
from tests.verify.driver.setting import make_recipe

recipe = make_recipe("current")
layers = tuple(linear(64) for _ in range(6))
eager = linear(64)
x = random(64, 64)
options = {"enabled": True, "recipe": recipe, "cache_quantized_params": True}
if TOGETHER:
    te.make_graphed_callables(layers, ((x,),) * 6, **options)
else:
    for layer in layers:
        te.make_graphed_callables(layer, (x,), **options)
flag = getattr(Manager, "quantization_state", Manager).skip_fp8_weight_update_tensor
fills = []
for step in range(2):
    for first in (True, False):
        before, out = flag._version, x
        with te.autocast(enabled=True, recipe=recipe):
            out = eager(out) if EAGER else out
            for layer in layers:
                out = layer(out, is_first_microbatch=first)
        fills.append(flag._version - before)
        assert bool(flag) is not first or OFF
print(json.dumps(fills))
"""


@pytest.mark.parametrize("together", [True, False])
def test_graphs_fill_the_shared_skip_flag_once_in_an_autocast(together: bool) -> None:
    program = f"TOGETHER, EAGER, OFF = {together}, False, False{FILLS}"
    assert json.loads(run_program(program)) == [1, 1, 1, 1]
    assert json.loads(run_program(program, TE_GRAPH_FIXES="off")) == [1, 1, 1, 1]


def test_behind_an_eager_module_graphs_fill_the_flag_once_instead_of_never() -> None:
    assert json.loads(run_program(f"TOGETHER, EAGER, OFF = True, True, False{FILLS}")) == [1, 1, 1, 1]
    off = run_program(f"TOGETHER, EAGER, OFF = True, True, True{FILLS}", TE_GRAPH_FIXES="off")
    assert json.loads(off) == [0, 0, 0, 0]


IN_ANOTHER_THREAD = """
from tests.verify.driver.comparison import error
from tests.verify.driver.setting import make_recipe

recipe = make_recipe("current")
other = linear(64, bias=False)
x = random(64, 64, grad=False)
found = []

def infer(first):
    with torch.no_grad(), te.autocast(enabled=True, recipe=recipe):
        found.append(other(x, is_first_microbatch=first).clone())

infer(True)
with torch.no_grad():
    other.weight.mul_(-1)

class Layer(te.Linear):
    is_first_microbatch = True

    def forward(self, x):
        if torch.cuda.is_current_stream_capturing() and len(found) == 1:
            thread = threading.Thread(target=infer, args=(False,))
            thread.start()
            thread.join()
        out = super().forward(x, is_first_microbatch=self.is_first_microbatch)
        self.is_first_microbatch = False
        return out

layer = Layer(64, 64, bias=False, params_dtype=torch.bfloat16, device="cuda").eval()
te.make_graphed_callables(layer, (x.clone(),), enabled=True, recipe=recipe)
infer(False)
assert len(found) == 3
print(error([found[0]] * 2, found[1:]))
"""


def test_an_eager_module_in_another_thread_keeps_its_weights_during_a_capture() -> None:
    assert float(run_program(IN_ANOTHER_THREAD)) == 0.0


KINDS_OF_MARKS = """
from tests.verify.driver.setting import make_recipe

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear(bias=False)

    def forward(self, x):
        return self.linear(x, is_first_microbatch=self.is_first_microbatch)

class OfClass(Layer):
    is_first_microbatch = False

    def mark(self, first):
        OfClass.is_first_microbatch = first

class ReadOnly(Layer):
    first = False
    is_first_microbatch = property(lambda self: self.first)

    def mark(self, first):
        self.first = first

class Property(Layer):
    first = False
    is_first_microbatch = property(lambda self: self.first, lambda self, first: vars(self).update(first=first))

    def mark(self, first):
        self.is_first_microbatch = first

class Slot(Layer):
    __slots__ = ("is_first_microbatch",)

    def __init__(self):
        super().__init__()
        self.is_first_microbatch = False

    mark = Property.mark

class Stored(Layer):
    def __init__(self):
        super().__init__()
        self.__dict__["stored"] = {"is_first_microbatch": False}

    def __setattr__(self, name, value):
        self.stored.update({name: value}) if name == "is_first_microbatch" else super().__setattr__(name, value)

    def __getattr__(self, name):
        return self.stored[name] if name == "is_first_microbatch" else super().__getattr__(name)

    mark = Property.mark

class Clearing(Layer):
    is_first_microbatch = False

    def forward(self, x):
        y = super().forward(x)
        vars(self).pop("is_first_microbatch", None)
        return y

    mark = Property.mark

class ClearingClass(OfClass):
    def forward(self, x):
        y = super().forward(x)
        ClearingClass.is_first_microbatch = False
        return y

    def mark(self, first):
        ClearingClass.is_first_microbatch = first

def outputs(kind, graph):
    torch.manual_seed(1)
    layer, recipe = kind().eval(), make_recipe("current")
    with torch.no_grad():
        x = random(16, 32, grad=False)
        layer.mark(True)
        with te.autocast(enabled=True, recipe=recipe):
            layer(x)
        layer.mark(False)
        if graph:
            te.make_graphed_callables(layer, (x.clone(),), enabled=True, recipe=recipe)
        for _ in range(2):
            layer.linear.weight.mul_(-2)
            for microbatch in range(2):
                layer.mark(microbatch == 0)
                with te.autocast(enabled=True, recipe=recipe):
                    yield layer(x).clone()

for kind in (OfClass, ReadOnly, Property, Slot, Stored, Clearing, ClearingClass):
    print(kind.__name__, all(torch.equal(a, b) for a, b in zip(outputs(kind, False), outputs(kind, True), strict=True)))
"""


def test_marks_are_restored_in_the_place_that_holds_them() -> None:
    found = run_program(KINDS_OF_MARKS).splitlines()[-7:]
    assert [line.split()[1] for line in found] == ["True"] * 7, found


OVERWRITES = """
class Layer(torch.nn.Module):
    is_first_microbatch = True

    def __init__(self):
        super().__init__()
        self.linear = linear(bias=False, fuse_wgrad_accumulation=True)
        self.linear.weight.main_grad = torch.zeros(32, 32, device="cuda")

    def forward(self, x):
        return self.linear(x, is_first_microbatch=self.is_first_microbatch)

def train(graph, captured, marks):
    torch.manual_seed(1)
    layer = Layer()
    layer.is_first_microbatch = captured
    x = random(16, 32)
    run = te.make_graphed_callables(layer, (x.detach().clone().requires_grad_(),)) if graph else layer
    for layer.is_first_microbatch in marks:
        run(x).sum().backward()
        yield layer.linear.weight.main_grad.clone()
    with torch.no_grad():
        layer.is_first_microbatch = False
        y = run(x)
    yield y

for captured, marks in ((True, [True, True]), (False, [True, False]), (True, [True, False])):
    try:
        compare(train, captured, marks)
        print("equal")
    except RuntimeError as error:
        print("captured with is_first_microbatch=True and is replayed with False" in str(error), "raises")
"""


def test_a_graph_that_overwrites_main_grad_refuses_later_microbatches() -> None:
    assert run_program(OVERWRITES).splitlines()[-3:] == ["equal", "equal", "True raises"]


KEPT = """
from tests.verify.driver.setting import make_recipe

class Layer(torch.nn.Module):
    def __init__(self, where, fused, recomputes):
        super().__init__()
        self.linear = linear(bias=False, fuse_wgrad_accumulation=fused)
        self.recomputes = recomputes
        self.owner = {"itself": lambda: self, "submodule": lambda: self.linear}.get(where)

    def forward(self, x, is_first_microbatch=None):
        first = self.owner().is_first_microbatch if self.owner else is_first_microbatch
        run = lambda x: self.linear(x, is_first_microbatch=first)
        return te.checkpoint(run, x) if self.recomputes else run(x)

class Outer(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, self.is_first_microbatch)

def train(graph, name, where, fused, recomputes, count, ordered):
    torch.manual_seed(1)
    recipe = make_recipe(name) if name else None
    layer = Layer(where, fused, recomputes)
    module = Outer(layer) if where == "outer" else layer
    owner = module if where == "outer" else layer.owner and layer.owner()
    weight = layer.linear.weight
    if owner:
        owner.is_first_microbatch = True
    if fused:
        weight.main_grad = torch.zeros(32, 32, device="cuda")
    runs = [module] * count
    if graph:
        number = count if ordered else 1
        order = {"_order": [1, -1] * count} if ordered else {}
        samples = tuple((random(),) for _ in range(number))
        graphs = te.make_graphed_callables((module,), samples, enabled=bool(name), recipe=recipe, **order)
        runs = [*graphs] * (count // number)
        weight.grad = None
    torch.manual_seed(2)
    for step in range(2):
        for microbatch, run in enumerate(runs):
            is_first, x = microbatch == 0, random()
            keywords = {} if owner else {"is_first_microbatch": is_first}
            if owner:
                owner.is_first_microbatch = is_first
            with te.autocast(enabled=bool(name), recipe=recipe):
                y = run(x, **keywords)
            y.float().square().mean().backward()
            yield from (y.detach().clone(), x.grad)
        grad = weight.main_grad if fused else weight.grad
        yield grad.clone()
        with torch.no_grad():
            weight -= grad.to(weight.dtype)
            if count > 1 or not fused or not owner:  # otherwise each microbatch overwrites main_grad
                grad.zero_()

def outcome(*case):
    try:
        compare(train, *case)
        return True
    except AssertionError:
        return False
    except (RuntimeError, ValueError) as error:
        return "raises" if "is_first_microbatch" in str(error) else str(error)

flags = (False, True)
for name, where, fused, recomputes in itertools.product(
    (None, "delayed", "current"), ("itself", "submodule", "outer", "keyword"), flags, flags
):
    if name == "current" and where != "itself":
        continue
    found = [outcome(name, where, fused, recomputes, count, fused == recomputes) for count in (1, 3)]
    is_marked = where != "keyword"
    raises = is_marked and fused or name == "delayed" and (recomputes or not is_marked)
    if found != [True, "raises" if raises else True]:
        print("wrong:", name, where, fused, recomputes, found)
"""


def test_a_mark_that_no_forward_clears_counts_or_raises() -> None:
    assert "wrong" not in run_program(KEPT)


ONLY_REUSED = """
from tests.verify.driver.setting import make_recipe

class Layer(torch.nn.Module):
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

def train(graph, name, runs_before, loads, fails):
    torch.manual_seed(1)
    recipe, layers = make_recipe(name), (Layer(), Layer())
    for layer in layers if runs_before else ():
        with torch.no_grad(), te.autocast(enabled=True, recipe=recipe):
            layer(random())
    for layer in layers if graph else ():
        layer.fails = fails
        with contextlib.suppress(ZeroDivisionError):
            te.make_graphed_callables(layer, (random(),), enabled=True, recipe=recipe)
        layer.fails = False
    if loads:
        for layer in layers:
            layer.linear.weight.data.mul_(-3)
    torch.manual_seed(2)
    for _ in range(3):
        x = y = random()
        for layer in layers:
            with te.autocast(enabled=True, recipe=recipe):  # the first autocast updates the scales of both layers
                y = layer(y)
        y.float().square().mean().backward()
        yield from (y, x.grad)

for case in itertools.product(("delayed", "current", "block"), *[(False, True)] * 3):
    compare(train, *case)
"""


def test_weights_that_are_only_reused_are_quantized_in_the_first_step() -> None:
    """The weights are loaded after the capture, or have newer scales then. A capture may also fail."""
    run_program(ONLY_REUSED)
