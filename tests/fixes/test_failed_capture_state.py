"""``failed-capture-state`` on the simulator, where a read from the GPU has spoiled a capture; `verify` has the rest."""

from __future__ import annotations

import pytest

from te_graph_fixes.verify.cases import Case
from tests.support import published
from tests.support.child import outcome

FIX = "failed-capture-state"
NEEDED = FIX in published.te("installed").needed
SPOILED = Case("spoiled", (FIX,), "programs:compare", {"recipe": "delayed", "events": ("failed_capture 5 6", "step")})


def test_a_spoiled_capture_leaves_everything_as_it_was() -> None:
    assert outcome(SPOILED, TE_GRAPH_FIXES="on").right


@pytest.mark.skipif(not NEEDED, reason="this TE has the corrected code")
def test_without_the_fix_the_process_is_damaged() -> None:
    assert outcome(SPOILED, TE_GRAPH_FIXES="off").wrong
