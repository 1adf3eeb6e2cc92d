"""Test on the simulator that fixes fail if torch lacks a private name that their support modules need."""

from __future__ import annotations

import pytest

from tests.support.child import simulate

pytestmark = pytest.mark.te

FIXES = {
    "_storage_Use_Count": "replay-contract",
    "_current_graph_task_id": (
        "backward-amax-reduction failed-capture-state fp8-state-at-replay grouped-linear-skip-flag recompute-in-graphs"
        " replay-contract skip-flag-reset stale-fp8-weights state-after-evaluation warmup-reset"
    ),
}
"""For each private name of torch, the fixes that need it, and the fixes that require those."""
PROGRAM = """
import torch, te_graph_fixes

found = torch._C.NAME
del torch._C.NAME
import transformer_engine.pytorch
torch._C.NAME = found  # the simulator needs it

statuses = {fix_id: (str(fix.status), fix.reason) for fix_id, fix in te_graph_fixes.report().fixes.items()}
print(*(f"{fix_id}={status}" for fix_id, (status, _) in statuses.items()))
status, reason = statuses["replay-contract"]
assert "ImportError: cannot import name 'NAME'" in reason, reason
"""


@pytest.mark.parametrize("name", FIXES)
def test_only_the_fixes_that_need_a_missing_name_fail(name: str) -> None:
    """The fixes that need a missing name, and their dependents, must fail when TE is imported, not in a capture."""
    statuses = dict(word.split("=") for word in simulate("-c", PROGRAM.replace("NAME", name), imported=()).split())
    expected = {fix_id for fix_id in FIXES[name].split() if statuses[fix_id] != "not-needed"}
    assert {fix_id for fix_id, status in statuses.items() if status == "failed"} == expected
    assert "applied" in statuses.values()
