"""Test that programs that break a replay precondition compute correct numbers or raise an error.

Most programs are cases of ``python -m tests.verify``. All run on the simulator.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from tests.support.child import START, on_simulator, run_program, simulate
from tests.verify.cases import CASES

pytestmark = pytest.mark.te

CONTRACT = [name for name, case in CASES.items() if {"replay-contract", "leaf-grad-lifetime"} & {*case.fixes}]
ALONE = [name for name in CONTRACT if name != "other-recipe-under-way"]
"""`CONTRACT` without the case in which another fix, ``state-after-evaluation``, raises the error."""
REFUSED = {
    "more-microbatches": "the backward of callable 0 (LayerNormMLP) of microbatch 0 cannot be replayed: the forward of "
    "callable 0 (LayerNormMLP) of microbatch 0 was replayed after its forward",
    "other-recipe-under-way": "after its forward, its modules ran in another recipe",
    "graph-twice-before-its-backward": "the forward of callable 0 (LayerNormMLP) was replayed after its forward",
    "module-twice-in-a-tuple": "the backward of callable 1 (LayerNormMLP) cannot be replayed",
    "captures-nested-in-a-pool": "callable 0 (LayerNormMLP) of capture 2 in its memory pool was replayed after",
    "replaced-module": "callable 0 (Sequential): a module (2) was added, replaced, moved or resized",
    "added-module": "a module in Sequential was added, replaced, moved or resized after this graph was captured",
    "forward-in-a-backward": "the forward of callable 0 (LayerNormMLP) was replayed after its forward",
    "frozen-fused-weight": "callable 0 (Linear): a weight was frozen after this graph was captured",
    "moved-before-the-backward": "callable 0 (LayerNormMLP): a parameter (layer_norm_weight) was added, replaced",
    "backward-twice": "capture with retain_graph_in_backward=True",
    "checkpoints-in-flight": "the forward of callable 0 (LayerNormMLP) of microbatch 0 was replayed after its forward",
    "checkpoints-in-another-order": "was replayed after the forward of callable 0 (LayerNormMLP) of microbatch 1",
    "loaded-under-way": "callable 0 (LayerNormMLP) of microbatch 1: a parameter (fc2_bias) was added, replaced",
    "operation-in-a-checkpoint": "was replayed after the forward of callable 0 (LayerNormMLP) of microbatch 1",
    "checkpoint-outside-of-the-autocast": "Use te.checkpoint, which enters the autocast again",
    "checkpoints-of-two-microbatches": "modified by an inplace operation",
    "checkpoints-of-one-module": "a checkpoint recomputes this graph from its own output",
    "recomputed-for-another-microbatch": "of callable 0 (LayerNormMLP) was replayed after its forward",
    "targets-of-two-microbatches": "modified by an inplace operation",
    "wgrad-after-the-next-forward": "the backward_dw of callable 0 (Linear) cannot be replayed: the forward of",
    "wgrad-before-the-backward": "callable 0 (Linear): backward_dw() was called without a backward before it",
    "data-of-a-parameter": "callable 0 (LayerNormMLP): a parameter (fc2_bias) was added, replaced",
    "offloaded-weights": "Copy into it in place, or capture again",
    "loaded-weights": "Copy into it in place, or capture again",
    "other-main-grad-under-way": "(Linear) of microbatch 1: the main_grad of a parameter was added, replaced",
    "other-main-grad": "callable 0 (Linear): the main_grad of a parameter was added, replaced",
    "data-of-an-fp8-parameter": "callable 0 (Linear): the _data of a parameter was added, replaced",
    "unfrozen-parameters": "a parameter that needed no gradient when this graph was captured needs one now",
}
"""For each program, a part of the message of the error that it must raise."""
UNAFFECTED = {
    *("fewer-microbatches", "captures-after-each-other-in-a-pool", "checkpoints-in-delayed-scaling"),
    *("written-in-place", "checkpoint-inside-of-the-autocast", "delayed-together"),
}
"""Programs that are correct without and with the fixes."""


@functools.cache
def run(disable: str) -> dict[str, Any]:
    """Run `CONTRACT` or, without the fixes in ``disable``, `ALONE` on the simulator. Return the results by case."""
    cases = ALONE if disable else CONTRACT
    done = on_simulator("-m", "tests.verify.child", *cases, TE_GRAPH_FIXES_DISABLE=disable)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["case"]: line for line in lines}


def measured(case: str, disable: str) -> dict[str, Any]:
    """Return the result of a case. Skip the test if this TE cannot run the case."""
    found = run(disable)[case]
    if found["outcome"] == "skipped":
        pytest.skip(found["detail"])
    return found


@pytest.mark.parametrize("case", CONTRACT)
def test_what_breaks_the_contract_is_right_or_raises(case: str) -> None:
    found = measured(case, "")
    assert found.get("error") == 0.0, found
    assert REFUSED.get(case, "") in found["measures"].get("message", "")
    assert (case in REFUSED) == ("message" in found["measures"])


@pytest.mark.parametrize("case", ALONE)
def test_without_the_fixes_it_is_wrong_without_a_word(case: str) -> None:
    found = measured(case, "replay-contract,leaf-grad-lifetime,replay-arguments")
    assert found["outcome"] == "measured", found
    assert (found["error"] > 0.01) == (case not in UNAFFECTED), found


RELEASED = """
def layers(number):
    made = [linear(fuse_wgrad_accumulation=True, bias=False) for _ in range(number)]
    for layer in made:
        layer.weight.main_grad = torch.zeros(32, 32, device="cuda")
    samples = tuple((random(),) for _ in made)
    te.make_graphed_callables(tuple(made), samples, pool=pool, allow_unused_input=True)
    for _ in range(2):
        x = random()
        for layer in made:
            x = layer(x)
        x.sum().backward()
    return made

pool = te.graph.graph_pool_handle()
(kept,), (layer, beside) = layers(1), layers(2)
main_grad = weakref.ref(layer.weight.main_grad)
layer.weight.main_grad = None
print(main_grad() is None)
layer.reset()
held = [each for each in gc.get_objects() if type(each).__name__ == "CallableTensors"]
found = {id(weight) for each in held for weight in each.fused}
print(found == {id(kept.weight), id(beside.weight)})
"""


def test_nothing_is_kept_alive() -> None:
    """A removed ``main_grad`` must be freed. After ``reset()``, only other callables' weights may be referenced."""
    assert run_program(RELEASED).splitlines() == ["True", "True"]


OTHER_SHAPE = """
layer = te.TransformerLayer(64, 64, 2, layer_number=3, self_attn_mask_type="no_mask", device="cuda")
x = torch.zeros(16, 2, 64, device="cuda", requires_grad=True)
graphed = te.make_graphed_callables(layer, (x,))
print(error_of(lambda: graphed(x[:8])))
"""


def test_an_error_about_arguments_names_the_layer_and_what_to_do() -> None:
    error = run_program(OTHER_SHAPE)
    assert error.startswith("The graph of TransformerLayer, layer 3, was captured for tensors of shapes [(16, 2, 64)]")
    assert ", and got shapes [(8, 2, 64)]. " in error
    assert error.endswith(" Pass arguments like the sample arguments, or capture again.\n")


ONCE_MORE = """
def captured(module):
    return te.make_graphed_callables(module, (random(),))

def in_checkpoint(function, *inputs):
    return checkpoint(function, *inputs, use_reentrant=False)

x, y, other = random(), random(), random()
layer = linear()
graph = captured(layer)
{}
"""

ANOTHER_IS_RECOMPUTED = """
first = graph(x).clone()
second = in_checkpoint(lambda y: graph(y).detach() * other, y)
(first.sum() + second.sum()).backward()
"""
TWICE_IN_A_CHECKPOINT = """
in_checkpoint(lambda x, y: graph(x).clone() * graph(y).clone().detach(), x, y).sum().backward()
"""
RECOMPUTED_FOR_NOTHING = """
first = graph(x).clone()
torch.autograd.grad(in_checkpoint(lambda y: graph(y) * other, y).sum(), other)
first.sum().backward()
"""
OFFLOADED_AND_CHECKPOINTED = """
with torch.autograd.graph.save_on_cpu():
    first = graph(x).clone()
torch.autograd.grad(in_checkpoint(lambda y: graph(y) * other, y).sum(), other)
first.sum().backward()
"""
ONE_BEHIND_ANOTHER_IS_RECOMPUTED = """
layers = linear(), linear()
te.make_graphed_callables(layers, ((random(),), (random(),)))
layers[1](layers[0](x)).sum().backward()
output = layers[1](layers[0](x)).clone()
in_checkpoint(lambda y, output: (layers[1](y).detach() * output).sin(), y, output).sum().backward()
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(ANOTHER_IS_RECOMPUTED, id="another is recomputed"),
        pytest.param(TWICE_IN_A_CHECKPOINT, id="twice in a checkpoint"),
        pytest.param(RECOMPUTED_FOR_NOTHING, id="recomputed for nothing"),
        pytest.param(OFFLOADED_AND_CHECKPOINTED, id="offloaded, and recomputed for nothing"),
        pytest.param(ONE_BEHIND_ANOTHER_IS_RECOMPUTED, id="one behind another is recomputed"),
    ],
)
def test_such_a_program_raises(program: str) -> None:
    stderr = on_simulator("-c", START + ONCE_MORE.format(program)).stderr
    assert "RuntimeError" in stderr
    assert "cannot be replayed" in stderr


IN_A_LATER_STEP = """
layers = [linear() for _ in range(2)]
te.make_graphed_callables(tuple(layers), tuple((random(),) for _ in layers))

def grads(in_checkpoint):
    for layer in layers:
        layer.zero_grad()
    first, second = layers
    in_checkpoint(lambda x: second(x).sin(), first(x)).square().sum().backward()
    return [layer.weight.grad.clone() for layer in layers]

replayed = [grads(lambda function, x: function(x)), grads(in_checkpoint)]
for layer in layers:
    del layer.forward
eager = grads(in_checkpoint)
print(all(torch.equal(*pair) for found in replayed for pair in zip(found, eager)))
"""
TWO_CHECKPOINTS = """
def grads(function, sequence):
    outputs = [in_checkpoint(lambda x: function(torch.relu(x)) * other, x).clone() for x in (x, y)]
    layer.zero_grad()
    for number in sequence:
        outputs[number].square().sum().backward()
    return layer.weight.grad.clone()

sequences = (0, 1), (1, 0)
replayed = [grads(graph, sequence) for sequence in sequences]
del layer.forward
print(all(torch.equal(grad, grads(layer, sequence)) for grad, sequence in zip(replayed, sequences)))
"""
ON_AN_OLDER_TORCH = """
import torch

del torch._C._autograd._top_saved_tensors_default_hooks
"""


@pytest.mark.parametrize("before", ["", pytest.param(ON_AN_OLDER_TORCH, id="torch before 2.8")])
def test_two_checkpoints_around_one_graph_are_right(before: str) -> None:
    assert simulate("-c", before + START + ONCE_MORE.format(TWO_CHECKPOINTS), imported=()) == "True\n"


def test_a_checkpoint_that_first_comes_in_a_later_step_is_right() -> None:
    assert run_program(ONCE_MORE.format(IN_A_LATER_STEP)) == "True\n"


LATER = """
def move(layers):
    for layer in layers:
        layer.weight.data = layer.weight.data.clone()

def move_main_grad(layer):
    layer.weight.main_grad = layer.weight.main_grad.clone()

def forward(first):
    kwargs = {} if first is None else {"is_first_microbatch": first}
    x = random()
    for layer in callables:
        x = layer(x, **kwargs)
    return x

def evaluate():
    with torch.no_grad():
        forward(None)

def step(first=None, between=lambda: None):
    output = forward(first)
    between()
    output.sum().backward()

def raises(first):
    return "was added, replaced" in error_of(lambda: step(first))

for change, first in (
    (lambda: move(layers), None),
    (lambda: move(layers[2:3]), None),
    (lambda: move_main_grad(layers[1]), None),
    (lambda: step(between=lambda: move(layers)), None),
    (lambda: (step(True), move(layers), forward(False)), None),
    (lambda: (step(True), move(layers)), False),
    (lambda: (move(layers[:1]), evaluate()), None),
):
    layers = [linear(fuse_wgrad_accumulation=True) for _ in range(4)]
    callables = [*layers, torch.nn.Sequential(torch.nn.GELU())]
    for layer in layers:
        layer.weight.main_grad = torch.zeros(32, 32, device="cuda")
    samples = tuple((random(),) for _ in callables)
    te.make_graphed_callables(tuple(callables), samples, allow_unused_input=True)
    for _ in range(3):
        step()
    if error := error_of(change):
        print("at once, in", error[:10])
    else:
        print("in the next step" if raises(first) and raises(False) else "never")
"""


IN_THE_FIRST = "at once, in callable 0"
NEXT = "in the next step"


def test_a_change_raises_at_once() -> None:
    """The first replay after a change must raise the error, even within a step, and for every microbatch."""
    found = run_program(LATER).splitlines()
    assert found == [NEXT] * 3 + ["at once, in callable 3", IN_THE_FIRST, NEXT, IN_THE_FIRST]


TURN_ABOUT = """
layer = linear()
samples = [(random(),) for _ in range(2)]
graphs = te.make_graphed_callables((layer,), samples, _order=[1, -1, 1, -1], allow_unused_input=True)
x = random()
for graph in graphs * 2:
    graph(x).sum().backward()
"""
WEIGHT_REPLACED = """
graphs[0](x).sum().backward()
layer.weight.data = layer.weight.data.clone()
print(error_of(lambda: graphs[1](x)))
"""
ONE_RESET = """
graphs[0].reset()
x.grad = None
graphs[1](x).sum().backward()
replayed, x.grad = x.grad, None
layer(x).sum().backward()
print(torch.equal(replayed, x.grad))
"""


def test_steps_of_one_microbatch_that_take_the_graphs_of_an_order_in_turn_look_each() -> None:
    assert run_program(TURN_ABOUT + WEIGHT_REPLACED).startswith(
        "callable 0 (Linear) of microbatch 1: a parameter (weight) was added, replaced"
    )


def test_a_graph_goes_on_when_another_is_reset() -> None:
    assert run_program(TURN_ABOUT + ONE_RESET) == "True\n"


WITH_SOMETHING_LEFT_OUT = """
layers = [linear(fuse_wgrad_accumulation=True) for _ in range(3)]
for layer in layers:
    layer.weight.main_grad = torch.zeros(32, 32, device="cuda")
order = {"_order": ORDER, "_num_layers_per_chunk": [3]}
graphs = te.make_graphed_callables(tuple(layers), [(random(),) for _ in range(9)], allow_unused_input=True, **order)

def forward(microbatch):
    output = random()
    for graph in graphs[3 * microbatch : 3 * microbatch + 3]:
        output = graph(output)
    return output.sum()

for _ in range(2):
    outputs, microbatches = [], iter(range(3))
    for chunk in ORDER:
        if chunk > 0:
            outputs.append(forward(next(microbatches)))
        else:
            outputs.pop(0).backward()
try:
    STEP
except RuntimeError as error:
    print(error)
"""
FORWARDS_FIRST, ONE_AND_TWO = "[1, 1, 1, -1, -1, -1]", "[1, -1, 1, 1, -1, -1]"
NO_FIRST_BACKWARD = """
    outputs = forward(0), forward(1)
    layers[0].weight.main_grad = torch.zeros(32, 32, device="cuda")
    outputs[1].backward()
"""
NO_FIRST_FORWARD = """
    forward(0).backward()
    layers[1].weight.data = layers[1].weight.data.clone()
    forward(2).backward()
"""


@pytest.mark.parametrize(
    ("order", "step", "error"),
    [
        (FORWARDS_FIRST, NO_FIRST_BACKWARD, "callable 0 (Linear) of microbatch 1: the main_grad of a parameter was"),
        (ONE_AND_TWO, NO_FIRST_FORWARD, "callable 1 (Linear) of microbatch 2: a parameter (weight) was"),
    ],
)
def test_what_is_left_out_is_not_taken_for_looked_at(order: str, step: str, error: str) -> None:
    program = WITH_SOMETHING_LEFT_OUT.replace("ORDER", order).replace("STEP", step.strip())
    assert run_program(program).startswith(error)


BEHIND_ONE_WITHOUT_FP8 = """
class Calls(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x):
        return self.layer.forward(x)

def step():
    graphs[1](graphs[0](random())).sum().backward()

layers = torch.nn.Linear(32, 32, **BF16), CALLABLE
graphs = te.make_graphed_callables(layers, ((random(),), (random(),)), enabled=(False, True), allow_unused_input=True)
with te.autocast(enabled=True):
    step()
with warnings.catch_warnings(record=True) as given:
    warnings.simplefilter("always")
    step()
print(*(f"{warning.filename}: {warning.message}" for warning in given))
"""


@pytest.mark.parametrize(("module", "name"), [("linear()", "Linear"), ("Calls()", "Calls")])
def test_a_graph_in_fp8_behind_one_without_warns_outside_of_an_autocast(module: str, name: str) -> None:
    """A module may also run its layers by their ``forward``."""
    assert run_program(BEHIND_ONE_WITHOUT_FP8.replace("CALLABLE", module)).startswith(
        f"<string>: callable 1 ({name}): this FP8 graph is replayed outside te.autocast"
    )  # the warning names the program's file, not a file of TE


ACTIVATIONS = """
def captured(pool):
    module = torch.nn.Sequential(te.LayerNormMLP(32, 64, params_dtype=torch.bfloat16, device="cuda"))
    te.make_graphed_callables(module, (random(),), pool=pool)
    return module

def raises(run):
    error = error_of(run)
    assert not error or "cannot be replayed" in error or "was added, replaced" in error, error
    return bool(error)

def nested(first, second):
    output, _ = first(random()), second(random())
    output.sum().backward()

def move(module):
    weight = module[0].fc1_weight
    kept, weight.data = weight.data, weight.data.clone()
    try:
        module(random())
    finally:
        weight.data = kept

number = 0
for steps in itertools.product((None, te_graph_fixes.deactivate, te_graph_fixes.activate), repeat=2):
    te_graph_fixes.activate()
    active, pool, modules, are_ours = True, te.graph.graph_pool_handle(), [], []
    for step in steps:
        modules.append(captured(pool))
        are_ours.append(active)
        if step:
            step()
            active = step is te_graph_fixes.activate
    for module, is_ours in zip(modules, are_ours):
        nested(module, torch.nn.Identity())  # without another replay in between, this is correct
        assert raises(lambda: move(module)) == is_ours, (steps, are_ours)
    for (one, is_ours), (other, is_too) in itertools.combinations(zip(modules, are_ours), 2):
        assert raises(lambda: nested(one, other)) == (is_ours and is_too), (steps, are_ours)
    number += sum(are_ours)
print(number)
"""


def test_a_capture_keeps_its_contract_through_any_sequence_of_activations() -> None:
    """A graph must check replay preconditions if, and only if, the fixes were active during its capture."""
    number = int(run_program(ACTIVATIONS))
    assert number == 9 + 6  # 9 first captures, and 6 second captures without a deactivation before them


COPIES = """
import copyreg, pickle

class Plain(torch.nn.Linear):
    pass

class OwnWay(torch.nn.Linear):
    def __deepcopy__(self, memo):
        made = memo[id(self)] = type(self).__new__(type(self))
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

class Single(torch.nn.Linear):
    def __deepcopy__(self, memo):
        return self

class Witness:
    # An attribute that is copied with its module. During the copy, it prints whether the module has its graph.
    def __init__(self, module):
        self.module = module

    def __reduce__(self):
        print("has its graph" if "forward" in vars(self.module) else "has no graph")
        return object, ()

def graphed(module):
    te.make_graphed_callables(module, (random(dtype=torch.float32),))
    return module

def is_eager(module):
    x = torch.randn(32, 32, device="cuda")
    with torch.no_grad():
        module.weight.data = module.weight.data * 2
        computes = torch.equal(module(x), type(module).forward(module, x))
        module.weight.data = module.weight.data / 2
    return computes and not vars(module).keys() & {"forward", "backward_dw", "reset", "__reduce_ex__", "__deepcopy__"}

def compare():
    layer = graphed(MODULE)
    layer.witness, layer.tag, weight = Witness(layer), "the original's", layer.weight.data
    shallow, deep, inside = copy.copy(layer), copy.deepcopy(layer), copy.deepcopy(torch.nn.Sequential(layer))[0]
    shallow.tag = "its own"
    of_shallow = copy.deepcopy(shallow)
    print(all(map(is_eager, (deep, inside, of_shallow, copy.deepcopy(deep), copy.deepcopy(of_shallow)))))
    print(getattr(of_shallow, "tag", None), of_shallow.weight is not layer.weight, is_eager(shallow))
    layer.weight.data = weight
    layer(random(dtype=torch.float32)).sum().backward()

def load():
    print(is_eager(pickle.loads(pickle.dumps(graphed(MODULE)))))

def keep():
    layer = graphed(MODULE)
    print(copy.deepcopy(layer) is layer, "forward" in vars(layer))

registered = {*copyreg.dispatch_table}
RUN()
print(registered == {*copyreg.dispatch_table})
"""
OF_ANY, OF_FX = "Plain(32, 32, device='cuda')", "torch.fx.symbolic_trace(torch.nn.Linear(32, 32, device='cuda'))"
COMPARED = ["has its graph"] * 3 + ["True", "its own True True", "True"]


@pytest.mark.parametrize(
    ("module", "run", "printed"),
    [
        ("te.Linear(32, 32, device='cuda')", "compare", COMPARED),
        (OF_ANY, "compare", COMPARED),
        (OF_ANY.replace("Plain", "OwnWay"), "compare", COMPARED),
        (OF_FX, "compare", ["has its graph", "has its graph", "True", "None True True", "True"]),
        (OF_ANY, "load", ["True", "True"]),
        (OF_ANY.replace("Plain", "Single"), "keep", ["True True", "True"]),
    ],
)
def test_copies_are_eager_and_the_original_keeps_its_graph(module: str, run: str, printed: list[str]) -> None:
    """Copies of a captured module, and copies of copies, must be eager, even if its class has a ``__deepcopy__``."""
    assert run_program(COPIES.replace("MODULE", module).replace("RUN", run)).splitlines() == printed


RELEASED_CAPTURES = """
from transformer_engine.pytorch import _te_replay_contract_record

def captured(pool):
    layer = linear()
    te.make_graphed_callables(layer, (random(),), pool=pool)
    layer(random()).sum().backward()
    return layer

pool = te.graph.graph_pool_handle()
kept = captured(pool)
(order,) = _te_replay_contract_record._pools.values()

def held():
    gc.collect()
    return len(order.names), len(order.times), len(order.records)

sizes = []
for number in range(8):
    layer = captured(pool)
    sizes.append(held())
    if number % 2:
        layer.reset()
    del layer
print(sizes[2:4] == sizes[4:6] == sizes[6:8])
layer = captured(pool)
output = kept(random())
layer(random())
del layer
gc.collect()
te.make_graphed_callables(linear(), (random(),), pool=pool)
print(error_of(output.sum().backward))
del kept, output, order
gc.collect()
print(len(_te_replay_contract_record._pools))
"""


def test_released_captures_leave_nothing_in_their_pool() -> None:
    """The record of a memory pool may keep nothing of released graphs except the time of their last replay."""
    bounded, error, pools = run_program(RELEASED_CAPTURES).splitlines()
    assert (bounded, pools) == ("True", "0")
    assert "cannot be replayed: a released graph was replayed after its forward" in error


RECIPES = """
layer = linear()
x = random()
te.make_graphed_callables(layer, (x,), enabled=True, recipe={captured}())
with te.autocast(enabled=True, recipe={replayed}()):
    layer(x)
"""


@pytest.mark.parametrize(
    ("captured", "replayed"),
    [
        ("Float8CurrentScaling", "DelayedScaling"),
        ("Float8CurrentScaling", "Float8BlockScaling"),
        ("DelayedScaling", "Float8CurrentScaling"),
    ],
)
def test_a_graph_is_not_for_another_recipe(captured: str, replayed: str) -> None:
    error = on_simulator("-c", START + RECIPES.format(captured=captured, replayed=replayed)).stderr
    assert f"captured with a {captured}RecipeState" in error
    assert f"is replayed with a {replayed}RecipeState" in error


AFTER_RESET = """
layer, x = linear(), random()
graph = te.make_graphed_callables(layer, (random(),))
late = graph(x)
graph.reset()
for call in (late.sum().backward, lambda: graph(x)):
    print("reset" in error_of(call))
"""


def test_a_graph_is_refused_after_its_reset() -> None:
    assert run_program(AFTER_RESET).splitlines() == ["True", "True"]


AUTOCAST = """
from unittest import mock

warnings.simplefilter("error")
layer = linear()
te.make_graphed_callables(layer, (random(),))
with mock.patch("torch.is_autocast_enabled", lambda: True):  # the simulator has no autocast of torch
    layer(torch.randn(32, 32, device="cuda")).sum().backward()
with torch.no_grad():
    layer(random(grad=False))
"""


def test_autocast_may_give_other_dtypes() -> None:
    run_program(AUTOCAST)


COPIED = """
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

layers = [linear(bias=False) for _ in range(4)]
te.make_graphed_callables(tuple(layers), tuple((random(),) for _ in layers), allow_unused_input=True)
x, real, copies = random(), torch.Tensor.clone, []
torch.Tensor.clone = lambda self, **options: (copies.append(self), real(self, **options))[1]

def trained(x, frozen=0):
    for layer in layers[frozen:]:
        x = layer(x)
    return x.sum()

def frozen(mode):
    with mode:
        y = layers[1](layers[0](x))
    return y.clone()

def backward(loss):
    copies.clear()
    loss.backward()

class Identity(saved_tensors_hooks):
    def __init__(self):
        super().__init__(lambda tensor: tensor, lambda tensor: tensor)

trained(x * 1).backward()
STEP
print(len(copies))
"""
OFFLOADED = """
with HOOKS:
    loss = trained(x * 1)
backward(loss)
"""
ALL_OFFLOADED = """
with HOOKS:
    backward(trained(x * 1))
"""
FROZEN = """
y = frozen(MODE)
backward(trained(y, 2))
"""
EVALUATED = """
with MODE:
    trained(x)
backward(trained(x * 1))
"""
TWO_STEPS_AFTER_A_CHECKPOINT = """
checkpoint(trained, x * 1, use_reentrant=False).backward()
backward(trained(x * 1))
"""
IN_THE_FORWARD = """
copies.clear()
with save_on_cpu():
    trained(x * 1)
frozen(torch.no_grad())
copies.pop()  # do not count the clone in `frozen`
"""


@pytest.mark.parametrize(
    ("step", "copies"),
    [
        (OFFLOADED.replace("HOOKS", "contextlib.nullcontext()"), 4),
        (OFFLOADED.replace("HOOKS", "Identity()"), 4),
        (OFFLOADED.replace("HOOKS", "save_on_cpu()"), 4),
        (OFFLOADED.replace("HOOKS", "save_on_cpu(), Identity()"), 4),
        (ALL_OFFLOADED.replace("HOOKS", "Identity()"), 4),
        (FROZEN.replace("MODE", "torch.no_grad()"), 2),
        (FROZEN.replace("MODE", "torch.set_grad_enabled(False)"), 2),
        (FROZEN.replace("MODE", "torch.inference_mode()"), 2),
        (EVALUATED.replace("MODE", "torch.no_grad()"), 4),
        (EVALUATED.replace("MODE", "torch.inference_mode()"), 4),
        (TWO_STEPS_AFTER_A_CHECKPOINT, 4),
        (IN_THE_FORWARD, 0),
    ],
)
def test_without_a_checkpoint_only_the_gradients_of_parameters_are_copied(step: str, copies: int) -> None:
    """Activation offloading, a frozen part and an evaluation must not be taken for checkpoints."""
    assert run_program(COPIED.replace("STEP", step)) == f"{copies}\n"


CHECKPOINTED = """
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

class Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.function(x)
        output.backward(grad)
        return None, x.grad

def offloaded(function):
    def inside(x):
        with save_on_cpu():
            return function(x)
    return inside

def around(function, x):
    with save_on_cpu():
        return checkpoint(function, x, use_reentrant=False)

def with_teacher(function):
    def inside(x):
        with torch.no_grad():
            target = layers[0](x).clone()
        return function(x) * target
    return inside

layers = [linear() for _ in range(4)]
te.make_graphed_callables(tuple(layers), tuple((random(),) for _ in layers))

def grads(x):
    for layer in layers:
        layer.zero_grad()
    first, second, third, fourth = layers
    y = CHECKPOINT
    fourth(third(y).relu()).square().sum().backward()
    return [layer.weight.grad.clone() for layer in layers if layer.weight.grad is not None]

x = random()
replayed = [grads(x) for _ in range(2)]
for layer in layers:
    del layer.forward
eager = grads(x)
print(all(len(found) == len(eager) and all(map(torch.equal, found, eager)) for found in replayed))
"""


@pytest.mark.parametrize(
    "program",
    [
        "checkpoint(lambda x: second(first(x)).sin(), x, use_reentrant=False)",
        "checkpoint(lambda x: second(first(x)).sin(), x, use_reentrant=True)",
        "te.checkpoint(lambda x: second(first(x)).sin(), x, use_reentrant=False)",
        "te.checkpoint(lambda x: second(first(x)).sin(), x)",
        "Recomputed.apply(lambda x: second(first(x)).sin(), x)",
        "checkpoint(offloaded(lambda x: second(first(x)).sin()), x, use_reentrant=False)",
        "te.checkpoint(offloaded(lambda x: second(first(x)).sin()), x, use_reentrant=False)",
        "around(lambda x: second(first(x)).sin(), x)",
        "checkpoint(with_teacher(lambda x: second(x).sin()), x, use_reentrant=False)",
        "checkpoint(with_teacher(lambda x: second(x).sin()), x, use_reentrant=True)",
    ],
)
def test_any_checkpoint_before_trained_layers_is_right(program: str) -> None:
    """Gradients must be correct with checkpoints of torch, of TE or in an autograd function, also with offloading."""
    assert run_program(CHECKPOINTED.replace("CHECKPOINT", program)) == "True\n"


def test_a_module_in_its_own_autocast_needs_no_other() -> None:
    """A replay outside an autocast must warn only if an eager call there would compute without FP8."""
    assert run_program(OWN_AUTOCAST) == ""


OWN_AUTOCAST = """
class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        with te.autocast(enabled=True):
            return self.linear(x)

graphed = te.make_graphed_callables(Own(), (random(),))
warnings.simplefilter("error")
graphed(random()).sum().backward()
"""
