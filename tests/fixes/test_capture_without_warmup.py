"""Test captures with ``num_warmup_iters=0`` on the simulator. A warmup that a fix adds must leave no trace."""

from __future__ import annotations

import json

import pytest

from tests.support.child import run_program

pytestmark = pytest.mark.te

EVALUATION = """
from tests.verify.driver.comparison import error
from tests.verify.driver.setting import make_recipe

class Counted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear = te.Linear(64, 64, params_dtype=torch.bfloat16, device="cuda")
        self.register_buffer("count", torch.zeros(1, device="cuda"))
        self.forwards = 0

    def forward(self, x):
        self.forwards += 1
        self.count += 1
        return self.linear(x)

def run(name, ran_before, grad, graphed):
    recipe = make_recipe(name) if name else None
    options = {"enabled": recipe is not None, "recipe": recipe}
    module = Counted().eval()
    torch.manual_seed(2)
    x = torch.randn(3, 64, 64, dtype=torch.bfloat16, device="cuda") * torch.arange(1, 4, device="cuda").view(3, 1, 1)
    outputs = []
    with torch.set_grad_enabled(grad):
        if ran_before:
            with te.autocast(**options):
                module(x[0])
        before = module.forwards
        if graphed:
            te.make_graphed_callables(module, (x[0].clone(),), num_warmup_iters=0, **options)
        seen = module.forwards - before, float(module.count) - before
        for microbatch in x:
            with te.autocast(**options):
                outputs.append(module(microbatch).detach().clone())
    return outputs, seen

found = []
for case in CASES:
    (eager, _), (graphed, seen) = run(*case, False), run(*case, True)
    found.append((error(eager, graphed), *seen))
print(json.dumps(found))
"""
RUN_AS_ASKED = [[recipe, False, grad] for recipe in ("", "current") for grad in (False, True)]
RUN_AS_ASKED += [["delayed", True, False], ["delayed", True, True]]
WITHOUT_SCALES = [["delayed", False, False], ["delayed", False, True]]


def test_a_capture_for_evaluation_runs_each_forward_once() -> None:
    program = f"CASES = {RUN_AS_ASKED}{EVALUATION}"
    assert json.loads(run_program(program)) == [[0.0, 1, 0.0]] * 6
    assert json.loads(run_program(program, TE_GRAPH_FIXES="off")) == [[0.0, 1, 0.0]] * 6


def test_a_module_of_delayed_scaling_without_scales_is_warmed_up() -> None:
    program = f"CASES = {WITHOUT_SCALES}{EVALUATION}"
    assert [error for error, *_ in json.loads(run_program(program))] == [0.0, 0.0]
    errors = [error for error, *_ in json.loads(run_program(program, TE_GRAPH_FIXES="off"))]
    assert errors[0] == 0.0
    assert errors[1] > 0.05


TRAINING = """
import random as numbers

RECIPE = DelayedScaling(amax_history_len=4)

class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1, device="cuda"), persistent=False)

    def forward(self, x):
        return x + self.count.add_(1).to(x.dtype)

class Layer(torch.nn.Module):
    in_warmup = False

    def __init__(self):
        super().__init__()
        self.counters = [{"one": Counter()}, torch.zeros(1, device="cuda")]
        self.norm = torch.nn.BatchNorm1d(32, **BF16)
        self.linear = linear()
        self.register_buffer("count", torch.zeros(1, device="cuda"))
        self.register_buffer("mean", torch.zeros(32, device="cuda"))  # a running mean, as in BatchNorm
        self.register_buffer("last", None)

    def forward(self, x):
        if self.in_warmup and not torch.cuda.is_current_stream_capturing():
            self.last = x.detach()
            numbers.random(), torch.rand(1, device="cpu")
        x = self.counters[0]["one"](x) + self.counters[1].add_(1).bfloat16()
        y = self.norm(self.linear(x)) + torch.rand(32, **BF16) + self.count.bfloat16()
        self.count.add_(1)
        self.mean.lerp_(y.detach().float().mean(0), 0.1)
        return y - self.mean.bfloat16()

def train(graph, enabled, is_training):
    torch.manual_seed(1)
    numbers.seed(1)
    layer = Layer().train(is_training)
    run, options = layer, {"enabled": enabled, "recipe": RECIPE}
    if graph:
        x = random(16, 32)
        state = numbers.getstate(), torch.get_rng_state()
        layer.in_warmup = True
        run = te.make_graphed_callables(layer, (x,), num_warmup_iters=0, **options)
        layer.in_warmup = False
        assert (numbers.getstate(), torch.get_rng_state().tolist()) == (state[0], state[1].tolist())
        assert layer.last is None
    torch.manual_seed(2)
    for _ in range(3):
        x = random(16, 32)
        with te.autocast(**options), torch.set_grad_enabled(is_training):
            y = run(x)
        yield from (y, layer.count, layer.mean, layer.norm.running_var, layer.counters[1])
        if is_training:
            (y.float() ** 2).mean().backward()
            yield from (x.grad, layer.linear.weight.grad)
        if enabled:
            yield layer.linear.fp8_meta["scaling_fwd"].amax_history
        layer.zero_grad()

for case in ((False, True), (True, True), (True, False)):
    compare(train, *case)
"""


def test_a_warmup_that_was_not_requested_leaves_no_trace() -> None:
    run_program(TRAINING)


CACHED = """
from transformer_engine.common.recipe import Float8CurrentScaling

class Marked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        return self.linear(x, is_first_microbatch=self.is_first_microbatch)

def evaluate(graph, firsts):
    torch.manual_seed(1)
    layer, options = Marked().eval(), {"enabled": True, "recipe": Float8CurrentScaling()}
    run = layer
    for number, layer.is_first_microbatch in enumerate((True, *firsts)):
        with torch.no_grad(), te.autocast(**options):
            yield run(random(16, 32)).clone()
        with torch.no_grad():
            layer.linear.weight.mul_(2)
            if graph and number == 0:
                layer.is_first_microbatch = False
                run = te.make_graphed_callables(layer, (random(16, 32),), num_warmup_iters=0, **options)
        torch.manual_seed(number)

for firsts in ((False, False, True, False), (True, False, True, False)):
    compare(evaluate, firsts)
"""


def test_a_replay_quantizes_cached_weights_only_in_first_microbatches() -> None:
    """Until a new first microbatch, replays must reuse the weights that the module cached before the capture."""
    run_program(CACHED)
