"""Marks of first microbatches that are set after a step, in graphs that do not cache weights; on the simulator."""

from __future__ import annotations

from tests.support.child import simulate

MARKED_AFTERWARDS = """
import torch
import te_graph_fixes
import transformer_engine.pytorch as te
from te_graph_fixes.verify.driver.comparison import error
from te_graph_fixes.verify.driver.setting import make_recipe

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear = te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16, device="cuda")
        self.other = te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16, device="cuda")
        self.is_first_microbatch = True

    def forward(self, x):
        out = self.other(self.linear(x, is_first_microbatch=self.is_first_microbatch))
        self.is_first_microbatch = False
        return out

found = []
for graphed in (False, True):
    layer, recipe = Layer(), make_recipe("delayed")
    x = torch.randn(5, 64, 64, dtype=torch.bfloat16, device="cuda") * torch.arange(1, 6, device="cuda").view(5, 1, 1)
    if graphed:
        te.make_graphed_callables(layer, (x[0].clone().requires_grad_(),), enabled=True, recipe=recipe)
    outputs = []
    for step in range(3):
        for microbatch in x:
            with te.autocast(enabled=True, recipe=recipe):
                out = layer(microbatch.clone().requires_grad_())
            out.backward(microbatch)
            outputs.append(out.detach().clone())
        layer.is_first_microbatch = True
        with torch.no_grad():
            for weight in layer.parameters():
                weight.sub_(0.01 * weight.grad.sign())
                weight.grad = None
    found.append(outputs)
print(error(*found))
"""


def test_marks_that_are_set_after_a_step_count_for_marked_modules_alone() -> None:
    """A capture does not take the first mark, and a module that is not told of first microbatches keeps no weights."""
    assert float(simulate("-c", MARKED_AFTERWARDS)) == 0.0


def test_without_the_fix_marks_are_lost() -> None:
    assert float(simulate("-c", MARKED_AFTERWARDS, TE_GRAPH_FIXES_DISABLE="stale-fp8-weights")) > 0.01
