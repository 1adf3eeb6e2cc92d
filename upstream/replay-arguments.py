"""A replay must reject arguments that do not match the sample arguments."""

import pytest
import torch
from transformer_engine.pytorch import Linear, make_graphed_callables


class _Mix(torch.nn.Module):
    def forward(self, tensors: dict) -> torch.Tensor:
        return tensors["a"] + 2 * tensors["b"]


def test_make_graphed_callables_rejects_keyword_for_positional_argument() -> None:
    """If a positional sample argument is passed by keyword, a replay must raise an error."""
    layer = Linear(128, 128, bias=False, params_dtype=torch.bfloat16, device="cuda")
    inp = torch.randn(128, 128, dtype=torch.bfloat16, device="cuda")
    graphed = make_graphed_callables(layer, (torch.randn_like(inp),))
    with pytest.raises((TypeError, ValueError)):
        graphed(inp=inp)


def test_make_graphed_callables_rejects_other_order_of_dict_keys() -> None:
    """If a dict has its keys in another order than its sample, a replay must raise an error."""
    a, b = torch.randn(2, 64, 64, device="cuda")
    graphed = make_graphed_callables(_Mix(), ({"a": a.clone(), "b": b.clone()},))
    with pytest.raises((TypeError, ValueError)):
        graphed({"b": b, "a": a})
