"""Test that all quick cases of a fix are bit-identical with the fixes, and that at least one is wrong without them."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.support import published
from tests.support.child import gpu, measured
from tests.verify.cases import CASES

pytestmark = pytest.mark.te

NEEDED = sorted(published.te("installed").needed)


@functools.cache
def results(switch: str, gpu_name: str) -> dict[str, Any]:
    """Run the quick cases of all needed fixes on one simulated GPU. Return the results by the name of the case."""
    cases = [case for case in CASES.values() if case.quick and {*NEEDED} & {*case.fixes} and gpu(case) == gpu_name]
    return measured(*cases, TE_GRAPH_FIXES=switch, TE_SIMULATOR_GPU=gpu_name)


@pytest.mark.parametrize("fix_id", NEEDED)
def test_a_fix_corrects_its_quick_cases(fix_id: str) -> None:
    wrong, skipped = [], ""
    for case in (case for case in CASES.values() if case.quick and fix_id in case.fixes):
        without, fixed = (results(switch, gpu(case))[case.name] for switch in ("off", "on"))
        if fixed["outcome"] == "skipped":
            skipped = fixed["detail"]
            continue
        assert fixed.get("error") == 0.0, fixed
        wrong.append(without["outcome"] == "failed" or without.get("error", 0.0) > 0.0)
    if skipped and not wrong:
        pytest.skip(skipped)
    assert any(wrong)
