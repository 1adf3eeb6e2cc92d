"""Test on the simulator that a replay sets ``grad_added_to_main_grad`` like an eager backward or `backward_dw`."""

from __future__ import annotations

import json

import pytest

from tests.support.child import run_program

pytestmark = pytest.mark.te

PROGRAM = """
def marks(kind, delay, graphed):
    is_grouped = kind == "GroupedLinear"
    options = {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": delay, "params_dtype": torch.bfloat16}
    layer = getattr(te, kind)(*(2,) * is_grouped, 32, 32, device="cuda", **options)
    run = WithSplits(layer, *([8, 8],) * is_grouped)
    parameters = [*layer.parameters()]
    for parameter in parameters:
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = parameter is parameters[-1]
    if graphed:
        te.make_graphed_callables(run, (random(16, 32),), allow_unused_input=True)
        assert parameters[-1].grad_added_to_main_grad
    seen = []
    for _ in range(3):
        for act in (lambda: run(random(16, 32)).sum().backward(), (run if graphed else layer).backward_dw):
            for parameter in parameters:
                parameter.grad_added_to_main_grad = False
            if delay or len(seen) % 2 == 0:
                act()
            seen.append([parameter.grad_added_to_main_grad for parameter in parameters])
    return seen

kinds = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")
programs = [(kind, delay) for kind in kinds for delay in (False, True)]
print(json.dumps([[marks(*each, graphed) for graphed in (False, True)] for each in programs]))
"""


def test_a_replay_sets_the_marks_of_an_eager_backward() -> None:
    found = json.loads(run_program(PROGRAM, TE_GRAPH_FIXES="on").splitlines()[-1])
    assert len(found) == 8
    for eager, graphed in found:
        assert any(map(any, eager))
        assert graphed == eager


def test_without_the_fix_a_replay_sets_no_mark() -> None:
    found = json.loads(run_program(PROGRAM, TE_GRAPH_FIXES_DISABLE="grad-added-mark").splitlines()[-1])
    assert not any(any(map(any, graphed)) for _, graphed in found)
