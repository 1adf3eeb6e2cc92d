"""A failed capture must restore the state of the process."""

import gc

import pytest
import torch
from transformer_engine.pytorch import Linear, make_graphed_callables
from transformer_engine.pytorch.graph import is_graph_capturing


class _FailsInCapture(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = Linear(64, 64, bias=False, params_dtype=torch.bfloat16, device="cuda")

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("an error in the module")
        return self.linear(inp)


def test_make_graphed_callables_restores_state_after_failure() -> None:
    """A failed capture must raise its first exception and restore all global state."""
    module = _FailsInCapture()
    call = _FailsInCapture.__call__
    module.linear.weight.grad = torch.ones_like(module.linear.weight)
    inp = torch.randn(64, 64, dtype=torch.bfloat16, device="cuda").requires_grad_()
    with pytest.raises(ValueError, match="an error in the module"):
        make_graphed_callables(module, (inp,))
    try:
        assert gc.isenabled()
        assert not is_graph_capturing()
        assert _FailsInCapture.__call__ is call
        assert module.linear.weight.grad is not None
    finally:
        gc.enable()
