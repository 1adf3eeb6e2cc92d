"""Test that the grad of a parameter with ``skip_backward_post_hook`` is never copied, as TransformerEngine documents.

A program that sets the attribute may keep the grad's address, so every replay must use the same storage.
"""

from __future__ import annotations

import json

import pytest

from te_graph_fixes.patching.source import Source
from tests.support.child import run_program

GRAPH = Source.installed().module("transformer_engine.pytorch.graph").text

pytestmark = [
    pytest.mark.te,
    pytest.mark.skipif("skip_backward_post_hook" not in GRAPH, reason="this TE has no skip_backward_post_hook"),
]


PROGRAM = """
layer, eager = torch.nn.Linear(32, 32, device="cuda"), torch.nn.Linear(32, 32, device="cuda")
layer.weight.skip_backward_post_hook = True
eager.load_state_dict(layer.state_dict())
graphed = te.make_graphed_callables(layer, (torch.randn(8, 32, device="cuda", requires_grad=True),))
kept = {"weight": [], "bias": []}
for _ in range(2):
    x = torch.randn(8, 32, device="cuda")
    for module in (eager, graphed):
        module.zero_grad(set_to_none=True)
        module(x.clone().requires_grad_()).sum().backward()
    for name, grads in kept.items():
        grads.append(getattr(layer, name).grad)
        assert torch.equal(grads[-1], getattr(eager, name).grad), name
print(json.dumps({name: len({grad.data_ptr() for grad in grads}) == 1 for name, grads in kept.items()}))
"""


@pytest.mark.parametrize("setting", ["on", "off"])
def test_the_grad_of_a_plain_parameter_keeps_its_storage(setting: str) -> None:
    assert json.loads(run_program(PROGRAM, TE_GRAPH_FIXES=setting)) == {"weight": True, "bias": False}
