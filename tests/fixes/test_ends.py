"""Each fix on the oldest and on the newest TransformerEngine (TE) that has its defect: wrong without, right with it.

The newest TE of all has the same in `tests/verify/test_verify.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from te_graph_fixes.fix import Fix
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.verify.cases import BLACKWELL_RECIPES, CASES, PRESWIZZLE, Case
from tests.support import published
from tests.support.child import measured


def ends(fix: Fix) -> list[str]:
    affected = [version for version in published.COVERED if version in SpecifierSet(fix.affected_versions)]
    return list(dict.fromkeys((affected[0], affected[-1])))


def gpu(case: Case) -> str:
    """What is simulated, where Hopper has not what a case needs."""
    if PRESWIZZLE in case.fixes:
        return "blackwell-rtx"
    return "blackwell" if case.options.get("recipe") in BLACKWELL_RECIPES else "hopper"


NEWEST = published.COVERED[-1]
ENDS = [(version, fix_id) for fix_id, fix in CATALOGUE.items() for version in ends(fix) if version != NEWEST]


@functools.cache
def results(version: str, switch: str, gpu_name: str) -> dict[str, Any]:
    """What the quick cases of all fixes that a TE is an end for give, by their names."""
    fixes = {fix_id for end, fix_id in ENDS if end == version}
    cases = [case for case in CASES.values() if case.quick and fixes & {*case.fixes} and gpu(case) == gpu_name]
    return measured(*cases, path=published.te(version).path, TE_GRAPH_FIXES=switch, TE_SIMULATOR_GPU=gpu_name)


@pytest.mark.parametrize(("version", "fix_id"), ENDS)
def test_the_quick_cases_of_a_fix(version: str, fix_id: str) -> None:
    assert fix_id in published.te(version).needed
    wrong, skipped = [], ""
    for case in (case for case in CASES.values() if case.quick and fix_id in case.fixes):
        without, fixed = (results(version, switch, gpu(case))[case.name] for switch in ("off", "on"))
        if fixed["outcome"] == "skipped":
            skipped = fixed["detail"]
            continue
        assert fixed.get("error") == 0.0, fixed
        wrong.append(without["outcome"] == "failed" or without.get("error", 0.0) > 0.0)
    if skipped and not wrong:
        pytest.skip(skipped)
    assert any(wrong)
