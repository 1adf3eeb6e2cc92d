"""Test on the simulator how many copies of gradients ``param-grad-lifetime`` makes at a replay.

The cases of `verify` compare the values of the gradients.
"""

from __future__ import annotations

import json

import pytest

from tests.support import published
from tests.support.child import run_program

pytestmark = pytest.mark.te

FIX = "param-grad-lifetime"
NEEDED = FIX in published.te("installed").needed
WEIGHTS = {"Linear": 1, "LayerNormLinear": 1, "LayerNormMLP": 2}
VECTORS = {"Linear": 1, "LayerNormLinear": 3, "LayerNormMLP": 4}
"""The numbers of biases and norm weights in each module. With the fix, one kernel copies all their gradients."""


COPIES = """
from unittest.mock import Mock, patch

copies = []
for fused in (False, True):
    sizes = (128, 256) if KIND == "LayerNormMLP" else (128, 128)
    options = {"bias": True, "fuse_wgrad_accumulation": fused, "params_dtype": torch.bfloat16, "device": "cuda"}
    module = getattr(te, KIND)(*sizes, **options)
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
    sample = random(32, 128)
    out = te.make_graphed_callables(module, (sample,))(sample)
    clone, cat = Mock(side_effect=torch.Tensor.clone), Mock(side_effect=torch.cat)
    with patch.object(torch.Tensor, "clone", lambda tensor: clone(tensor)), patch("torch.cat", cat):
        out.backward(torch.ones_like(out))
    of_grads = [call for call in cat.call_args_list if call.args[0][0].dtype == torch.bfloat16]
    copies.append(clone.call_count + len(of_grads))
print(json.dumps(copies))
"""
"""A program that prints the numbers of copies at a replay, without and with fused wgrads."""


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_are_copied_one_by_one_and_vectors_together(kind: str) -> None:
    plain, fused = json.loads(run_program(f"KIND = {kind!r}{COPIES}", TE_GRAPH_FIXES=FIX))
    assert plain == WEIGHTS[kind] + (1 if NEEDED else VECTORS[kind])
    assert fused == 1 or not NEEDED, "dummies of fused wgrads were copied, as in TE 2.19 and later"
