"""The cases of ``te-graph-fixes verify`` as tests: right with the fixes, and wrong without where a fix is needed."""

from __future__ import annotations

import pytest
import torch

from te_graph_fixes.fix import APPLICABLE
from te_graph_fixes.source import Source, TENotFoundError
from te_graph_fixes.verdicts import verdicts
from te_graph_fixes.verify.cases import CASES, PRESWIZZLE, Case
from te_graph_fixes.verify.runner import Child

FIXES = sorted({fix_id for case in CASES.values() for fix_id in case.fixes})


@pytest.fixture(scope="module")
def applicable() -> set[str]:
    """The fixes that the installed TransformerEngine needs."""
    try:
        return {fix_id for fix_id, verdict in verdicts(Source.installed()).items() if verdict.verdict == APPLICABLE}
    except TENotFoundError:
        return set()


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_replay_is_bit_identical_to_eager(case: Case, child: Child) -> None:
    found = child.measure(case)
    if found.outcome == "skipped":
        pytest.skip(found.detail)
    assert found.right, found


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_nothing_is_wrong_where_no_fix_applies(case: Case, unfixed_child: Child, applicable: set[str]) -> None:
    if applicable & set(case.fixes):
        pytest.skip("this TransformerEngine has the defect")
    found = unfixed_child.measure(case)
    if found.outcome == "skipped":
        pytest.skip(found.detail)
    assert found.right, found


@pytest.mark.parametrize("fix_id", FIXES)
def test_a_case_shows_the_defect(fix_id: str, unfixed_child: Child, applicable: set[str]) -> None:
    if fix_id not in applicable:
        pytest.skip("this TransformerEngine does not have the defect")
    if fix_id == PRESWIZZLE and torch.cuda.get_device_capability() < (12, 0):
        pytest.skip("a defect on GPUs of capability 12.x")
    outcomes = (unfixed_child.measure(case) for case in CASES.values() if fix_id in case.fixes)
    assert any(outcome.wrong for outcome in outcomes)
