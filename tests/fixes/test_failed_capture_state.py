"""Test the error and the skip flag of a failed capture on the simulator. Cases of `verify` test all other state."""

from __future__ import annotations

import pytest

from tests.support.child import run_program

pytestmark = pytest.mark.te

FAILS = """
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
    """If a later torch changes its private functions, a failed cleanup must not hide the error of the capture."""
    assert run_program(FAILS.replace("CHANGED", changed)) == "GraphError True True\n"


FIRST_FLAG = """
class Fails(torch.nn.Linear):
    def forward(self, x):
        raise ZeroDivisionError

state = getattr(Manager, "quantization_state", Manager)
try:
    te.make_graphed_callables(Fails(32, 32), (random(),), enabled=True, cache_quantized_params=True)
except ZeroDivisionError:
    print(state.skip_fp8_weight_update_tensor)
"""


def test_a_failed_capture_leaves_no_skip_flag() -> None:
    assert run_program(FIRST_FLAG) == "None\n"
