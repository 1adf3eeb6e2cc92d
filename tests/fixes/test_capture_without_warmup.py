"""Captures with ``num_warmup_iters=0``: an evaluation runs no warmup, as its caller asks; on the simulator."""

from __future__ import annotations

import json

import pytest

from tests.support.child import simulate

pytestmark = pytest.mark.te

EVALUATION = """
import json
import torch
import te_graph_fixes
import transformer_engine.pytorch as te
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
    assert json.loads(simulate("-c", program)) == [[0.0, 1, 0.0]] * 6
    assert json.loads(simulate("-c", program, TE_GRAPH_FIXES="off")) == [[0.0, 1, 0.0]] * 6


def test_a_module_of_delayed_scaling_without_scales_is_warmed_up() -> None:
    program = f"CASES = {WITHOUT_SCALES}{EVALUATION}"
    assert [error for error, *_ in json.loads(simulate("-c", program))] == [0.0, 0.0]
    errors = [error for error, *_ in json.loads(simulate("-c", program, TE_GRAPH_FIXES="off"))]
    assert errors[0] == 0.0
    assert errors[1] > 0.05
