"""Test on the simulator that a replayed `backward_dw` changes ``.grad`` like TE's eager `backward_dw`."""

from __future__ import annotations

import json

import pytest

from te_graph_fixes.fixes import CATALOGUE
from tests.support import published
from tests.support.child import outcome, run_program
from tests.verify.cases import Case

pytestmark = pytest.mark.te

FIX = CATALOGUE["delayed-wgrad-delivery"]
ALONE = f"{FIX.id},{','.join(FIX.requires)}"
MINOR = published.te("installed").minor
ORDER = [1, 1, -1, -1] if MINOR == 10 else [1, 1, -1, -1.5, -1, -1.5]
"""An order with wgrads, except on TE 2.10, which accepts only integers and captures each wgrad after its dgrad."""


KEPT = """
layer, called = linear(bias=False, delay_wgrad_compute=True), []
layer.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(1))
te.make_graphed_callables(layer, (random(),), allow_unused_input=True)
assert not called
kept = []
for _ in range(2):
    layer(random()).sum().backward()
    layer.backward_dw()
    kept += [layer.weight.grad, layer.weight.grad.clone()]
assert torch.equal(*kept[:2])
"""


def test_a_capture_runs_no_hook_and_a_delivered_gradient_is_a_copy() -> None:
    run_program(KEPT)


def test_the_modules_of_a_wgrad_graph_do_not_share_memory() -> None:
    """The wgrad graph of eight modules must keep all eight gradients until a replay delivers them."""
    options = {"modules": ("ListBlock",), "order": (1, -1, -1.5), "delay": True, "reuse": True, "keeps_grads": True}
    assert outcome(Case("eight modules", (), "programs:compare", {**options, "events": ("step", "step")})).error == 0.0


NODES = """
module = linear(bias=False, delay_wgrad_compute=True)
plain_forward, left = module.forward, []

def forward(x):
    node = module.weight.expand_as(module.weight).grad_fn.next_functions[0][0]
    if torch.cuda.is_current_stream_capturing():
        left.append("warmup" in node.metadata)
    else:
        node.metadata["warmup"] = True
    return plain_forward(x)

module.forward = forward
options = {"_order": ORDER, "_num_layers_per_chunk": [1], "allow_unused_input": True}
te.make_graphed_callables((module,), [(random(),) for _ in range(2)], **options)
print(json.dumps(left))
"""


def nodes(setting: str) -> list[bool]:
    """Capture two microbatches. Return whether each captured forward finds an autograd node left by the warmup."""
    return json.loads(run_program(f"ORDER = {ORDER}{NODES}", TE_GRAPH_FIXES=setting).splitlines()[-1])


def test_no_autograd_node_of_the_warmup_is_left_for_a_capture() -> None:
    assert nodes(ALONE) == [False, False]


@pytest.mark.skipif(not 13 <= MINOR <= 18, reason="this TE keeps no output of the warmup until the capture")
def test_without_the_fix_autograd_nodes_of_the_warmup_are_left() -> None:
    assert nodes("off") == [True, True]


TRAININGS = """
import hashlib, os
from tests.verify.driver.setting import make_recipe

def copy(grad):
    # An eager backward of GroupedLinear adds garbage to .grad in place, until backward_dw() replaces it.
    return None if grad is None else grad.clone()

def train(kind, recipe, fused, accumulates, graphed):
    torch.manual_seed(1)
    is_grouped = kind == "GroupedLinear"
    options = {"bias": True, "fuse_wgrad_accumulation": fused, "params_dtype": torch.bfloat16, "device": "cuda"}
    layer = getattr(te, kind)(*(2,) * is_grouped, 64, 64, delay_wgrad_compute=True, **options)
    parameters = [*layer.parameters()]
    for parameter in parameters:
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
    run = WithSplits(layer, *([32, 32],) * is_grouped)
    fp8 = {"enabled": bool(recipe), "recipe": make_recipe(recipe or "current")}
    if graphed:
        te.make_graphed_callables(run, (random(64, 64),), allow_unused_input=True, **fp8)
    torch.manual_seed(2)
    grads = []
    for _ in range(3):
        before = [copy(parameter.grad) for parameter in parameters]
        with te.autocast(**fp8):
            out = run(random(64, 64))
        out.backward(torch.randn_like(out))
        (run if graphed else layer).backward_dw()
        for parameter, sum_before in zip(parameters, before):
            if accumulates and sum_before is not None and parameter.grad is not None:
                parameter.grad = parameter.grad + sum_before
        # The .grad of a fused weight is a dummy.
        grads += [None if fused and each.dim() > 1 else copy(each.grad) for each in parameters]
    grads += [parameter.main_grad for parameter in parameters]
    return [None if grad is None else hashlib.md5(str(grad.tolist()).encode()).hexdigest() for grad in grads]

kinds = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")
programs = itertools.product(kinds, ("", "current"), (False, True), (False, True))
print(json.dumps({" ".join(map(str, each)): train(*each, os.environ["GRAPHED"] == "yes") for each in programs}))
"""


def trainings(setting: str, graphed: str) -> dict[str, list[str | None]]:
    """Run the programs. Return digests of each program's gradients, with None for missing gradients and dummies."""
    output = run_program(TRAININGS, TE_GRAPH_FIXES=setting, GRAPHED=graphed)
    found: dict[str, list[str | None]] = json.loads(output.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def te_alone() -> dict[str, list[str | None]]:
    return trainings("off", "no")


def test_eager_training_is_as_without_the_fixes(te_alone: dict[str, list[str | None]]) -> None:
    """Some programs add up the gradients themselves, because TE's eager `backward_dw` replaces ``.grad``."""
    assert trainings("on", "no") == te_alone


def test_graphs_equal_eager_training(te_alone: dict[str, list[str | None]]) -> None:
    found = trainings("on", "yes")
    assert {name for name, grads in te_alone.items() if grads != found[name]} == set()


BYTES = """
added = []
for microbatches in (2, 8):
    layer = linear(512, bias=False, delay_wgrad_compute=True)
    samples = [(random(16, 512),) for _ in range(microbatches)]
    options = {"_order": [1, -1, -1.5] * microbatches, "_num_layers_per_chunk": [1]}
    before = torch.cuda.memory_allocated()
    graphs = te.make_graphed_callables(
        (layer,), samples, sample_kwargs=[{}] * microbatches, allow_unused_input=True,
        _reuse_graph_input_output_buffers=True, **options,
    )
    added.append(torch.cuda.memory_allocated() - before)
print(json.dumps(added))
"""


@pytest.mark.skipif(MINOR == 10, reason="the order of TE 2.10 has no wgrads")
def test_microbatches_share_the_memory_of_one_wgrad() -> None:
    """A capture must not store a wgrad per microbatch: six more microbatches must need less memory than one weight."""
    two, eight = json.loads(run_program(BYTES))
    assert eight - two < 512 * 512 * 2


TWICE = """
layer, x = linear(delay_wgrad_compute=True), random(16, 32)
for times in (1, 2):
    layers = torch.nn.Sequential(*[layer] * times)
    print(error_of(lambda: te.make_graphed_callables(layers, (x,))(x).sum().backward())[:71] or "captured")
"""


def test_a_module_with_several_delayed_wgrads_is_refused() -> None:
    assert run_program(TWICE).splitlines()[-2:] == [
        "captured",
        "Linear has wgrads that remain after its backward_dw(), because the module ran more than once"[:71],
    ]
