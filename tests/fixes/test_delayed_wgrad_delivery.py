"""``delayed-wgrad-delivery`` on the simulator: a replayed `backward_dw` does to ``.grad`` what TE's eager one does.

Run as a program it prints, for each captured forward, whether autograd nodes of the warmup are still alive then.
"""

from __future__ import annotations

import json

import pytest

from te_graph_fixes.fixes import CATALOGUE
from tests.support import published
from tests.support.child import outcome, simulate
from tests.verify.cases import Case

pytestmark = pytest.mark.te

FIX = CATALOGUE["delayed-wgrad-delivery"]
ALONE = f"{FIX.id},{','.join(FIX.requires)}"
MINOR = published.te("installed").minor
ORDER = [1, 1, -1, -1] if MINOR == 10 else [1, 1, -1, -1.5, -1, -1.5]
"""TE 2.10 takes whole numbers only, and captures each wgrad right after its dgrad."""
SUPPORT_MODULE = """
import transformer_engine.pytorch, torch
from transformer_engine.pytorch._te_delayed_wgrad_delivery import DelayedGrad, assign_grads, record_backward_dw

def parameter(*shape):
    return torch.nn.Parameter(torch.zeros(*shape, device="cuda"))

weight, frozen, bias, bias_of_experts = parameter(2), parameter(2), parameter(2), parameter(2, 2)
frozen.requires_grad_(False)
static = {each: torch.ones_like(each) for each in (weight, frozen, bias, bias_of_experts)}
delayed = [DelayedGrad(each, grad, each.numel() == 4 or each is bias) for each, grad in static.items()]
assign_grads(delayed)
before = weight.grad
for grad in static.values():
    grad.fill_(5)
assert before.tolist() == [1, 1]
assign_grads(delayed)
assert before.tolist() == [1, 1]
assert weight.grad.tolist() == [5, 5]
assert bias.grad.tolist() == [1, 1]
assert bias_of_experts.grad.tolist() == [[6, 6], [6, 6]]
assert frozen.grad is None

class Delayed(torch.nn.Linear):
    # Its `backward_dw` gives both parameters a gradient if they have none, and fails if it is told to.
    fails, hooks_run = False, 0

    def count(self):
        self.hooks_run += 1

    def backward_dw(self):
        for parameter in self.parameters():
            if parameter.grad is None:
                parameter.grad = torch.ones_like(parameter)
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()
        if self.fails:
            raise ZeroDivisionError

for fails in (False, True):
    module = Delayed(2, 2, device="cuda")
    module.fails, module.wgrad_accumulation_and_reduce_hooks = fails, [module.count]
    kept = module.bias.grad = torch.full((2,), 7.0, device="cuda")
    try:
        ((parameter, grad, is_bias),) = record_backward_dw(module, [module.weight])
        assert not fails and parameter is module.bias and is_bias and grad.tolist() == [1, 1]
    except ZeroDivisionError:
        assert fails
    assert module.weight.grad is None and module.bias.grad is kept and kept.tolist() == [7, 7]
    assert (module.hooks_run, module.wgrad_accumulation_and_reduce_hooks) == (0, [module.count])
"""


def test_gradients_are_recorded_and_assigned() -> None:
    """A capture leaves gradients and hooks as they were, and a delivered gradient never aliases graph memory."""
    simulate("-c", SUPPORT_MODULE)


def test_the_modules_of_a_wgrad_graph_do_not_share_memory() -> None:
    """A wgrad graph of eight modules leaves all their gradients in its memory."""
    options = {"modules": ("ListBlock",), "order": (1, -1, -1.5), "delay": True, "reuse": True, "keeps_grads": True}
    assert outcome(Case("eight modules", (), "programs:compare", {**options, "events": ("step", "step")})).error == 0.0


def run(setting: str) -> list[list[bool]]:
    """Return the JSON that `main` prints in a child process on the simulator."""
    return [json.loads(line) for line in simulate(__file__, TE_GRAPH_FIXES=setting).splitlines() if line[0] == "["]


def test_no_autograd_node_of_the_warmup_is_left_for_a_capture() -> None:
    assert run(ALONE) == [[False, False]]


@pytest.mark.skipif(not 13 <= MINOR <= 18, reason="this TE keeps no output of the warmup")
def test_without_the_fix_autograd_nodes_of_the_warmup_are_left() -> None:
    assert run("off") == [[True, True]]


TRAININGS = """
import hashlib, itertools, json, os
import te_graph_fixes, torch, transformer_engine.pytorch as te
from tests.verify.driver.setting import make_recipe

class Layer(torch.nn.Module):
    def __init__(self, layer, *splits):
        super().__init__()
        self.layer, self.splits = layer, splits

    def forward(self, x):
        return self.layer(x, *self.splits)

def copy(grad):
    # An eager backward of GroupedLinear adds garbage to .grad in place, until backward_dw() replaces it.
    return None if grad is None else grad.clone()

def sample():
    return torch.randn(64, 64, dtype=torch.bfloat16, device="cuda").requires_grad_()

def train(kind, recipe, fused, accumulates, graphed):
    torch.manual_seed(1)
    is_grouped = kind == "GroupedLinear"
    options = {"bias": True, "fuse_wgrad_accumulation": fused, "params_dtype": torch.bfloat16, "device": "cuda"}
    layer = getattr(te, kind)(*(2,) * is_grouped, 64, 64, delay_wgrad_compute=True, **options)
    parameters = [*layer.parameters()]
    for parameter in parameters:
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
    run = Layer(layer, *([32, 32],) * is_grouped)
    fp8 = {"enabled": bool(recipe), "recipe": make_recipe(recipe or "current")}
    if graphed:
        te.make_graphed_callables(run, (sample(),), allow_unused_input=True, **fp8)
    torch.manual_seed(2)
    grads = []
    for _ in range(3):
        before = [copy(parameter.grad) for parameter in parameters]
        with te.autocast(**fp8):
            out = run(sample())
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
    """Return the gradients after each microbatch of each program, as digests."""
    output = simulate("-c", TRAININGS, TE_GRAPH_FIXES=setting, GRAPHED=graphed)
    found: dict[str, list[str | None]] = json.loads(output.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def te_alone() -> dict[str, list[str | None]]:
    return trainings("off", "no")


def test_eager_training_is_as_without_the_fixes(te_alone: dict[str, list[str | None]]) -> None:
    """This includes loops that sum the microbatches themselves, because TE's eager `backward_dw` replaces ``.grad``."""
    assert trainings("on", "no") == te_alone


def test_graphs_equal_eager_training(te_alone: dict[str, list[str | None]]) -> None:
    found = trainings("on", "yes")
    assert {name for name, grads in te_alone.items() if grads != found[name]} == set()


BYTES = """
import json, te_graph_fixes, torch, transformer_engine.pytorch as te
added = []
for microbatches in (2, 8):
    layer = te.Linear(512, 512, bias=False, delay_wgrad_compute=True, params_dtype=torch.bfloat16, device="cuda")
    samples = [
        (torch.ones(16, 512, dtype=torch.bfloat16, device="cuda", requires_grad=True),) for _ in range(microbatches)
    ]
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
    """A capture stores no wgrad per microbatch: six more microbatches need less memory than one weight."""
    two, eight = json.loads(simulate("-c", BYTES))
    assert eight - two < 512 * 512 * 2


def main() -> None:
    """Capture two forwards of a module whose parameter gets no gradient from the dgrad."""
    import torch
    import transformer_engine.pytorch as te

    import te_graph_fixes  # noqa: F401

    options = {"bias": False, "delay_wgrad_compute": True, "params_dtype": torch.bfloat16, "device": "cuda"}
    module = te.Linear(32, 32, **options)
    plain_forward = module.forward
    left = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        node = module.weight.expand_as(module.weight).grad_fn.next_functions[0][0]
        if torch.cuda.is_current_stream_capturing():
            left.append("warmup" in node.metadata)
        else:
            node.metadata["warmup"] = True
        return plain_forward(x)

    module.forward = forward
    samples = [(torch.randn(16, 32, dtype=torch.bfloat16, device="cuda", requires_grad=True),) for _ in range(2)]
    te.make_graphed_callables((module,), samples, _order=ORDER, _num_layers_per_chunk=[1], allow_unused_input=True)
    print(json.dumps(left))


if __name__ == "__main__":
    main()
