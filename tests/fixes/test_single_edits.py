"""Test that each edit of each fix is needed: without it, a case has another result or uses another amount of memory.

`tests.support.left_out` contains programs for edits that change neither the results nor the memory use of the cases.
"""

from __future__ import annotations

import collections
import functools
import json
from typing import Any

import pytest

from te_graph_fixes.status import Verdict
from tests.support import published
from tests.support.child import on_simulator
from tests.verify.cases import EXPERTS, PRESWIZZLE

pytestmark = pytest.mark.te

_, VERDICTS = published.examined("installed")
GPUS = {PRESWIZZLE: "blackwell-rtx", EXPERTS: "blackwell"}
"""The simulated GPU for fixes with edits that Hopper does not run."""

APPLIED = {fix_id: verdict.edits for fix_id, verdict in VERDICTS.items() if verdict.verdict == Verdict.APPLICABLE}
USES = collections.Counter(edit for edits in APPLIED.values() for edit in edits)
EDITS = [
    pytest.param(fix_id, number, id=f"{fix_id}-{number}")
    for fix_id, edits in APPLIED.items()
    for number, edit in enumerate(edits)
    if USES[edit] == 1  # another fix would make a shared edit
]


def lines(fix_id: str, number: int) -> list[dict[str, Any]]:
    gpu = GPUS.get(fix_id, "hopper")
    program = ("tests/support/single_edits.py", fix_id, str(number))
    done = on_simulator(*program, imported=(), TE_GRAPH_FIXES="on", TE_SIMULATOR_GPU=gpu)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return found if done.returncode == 0 else [*found, {"outcome": "failed", "detail": done.stderr[-500:]}]


@functools.cache
def with_all(fix_id: str) -> list[dict[str, Any]]:
    found = lines(fix_id, -1)
    assert found
    assert all(line["outcome"] == "measured" and line["error"] == 0.0 for line in found), found
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("fix_id", "number"), EDITS)
def test_an_edit_that_is_left_out_changes_something(fix_id: str, number: int) -> None:
    assert lines(fix_id, number) != with_all(fix_id), VERDICTS[fix_id].edits[number]
