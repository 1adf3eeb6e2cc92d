"""``failed-capture-state`` on the simulator: the error of a failed capture. `verify` has the state afterwards."""

from __future__ import annotations

import pytest

from tests.support.child import simulate

pytestmark = pytest.mark.te

FAILS = """
import torch, te_graph_fixes
import transformer_engine.pytorch as te

CHANGED

class Reads(torch.nn.Linear):
    def forward(self, x):
        if torch.cuda.is_current_stream_capturing():
            x.sum().item()
        return super().forward(x)

stream = torch.cuda.current_stream()
try:
    te.make_graphed_callables(Reads(32, 32, device="cuda"), (torch.ones(32, 32, device="cuda", requires_grad=True),))
except Exception as error:
    frames, trace = [], error.__traceback__
    while trace:
        frames.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    print(type(error).__name__, "forward" in frames, torch.cuda.current_stream() == stream)
"""
OTHER_SIGNATURE = """
torch._C._cuda_endAllocateToPool = torch._C._cuda_releasePool = lambda: None
"""


@pytest.mark.parametrize("changed", ["", OTHER_SIGNATURE])
def test_the_error_of_the_capture_is_raised_if_the_cleanup_fails_too(changed: str) -> None:
    """A later torch may change the private functions of the cleanup."""
    assert simulate("-c", FAILS.replace("CHANGED", changed)) == "GraphError True True\n"
