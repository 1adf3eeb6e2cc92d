"""``failed-capture-state`` on the simulator, where a read from the GPU has spoiled a capture; `verify` has the rest."""

from __future__ import annotations

import pytest

from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.source import Source
from te_graph_fixes.verify.cases import Case
from tests.support.child import outcome

FIX = CATALOGUE["failed-capture-state"]
NEEDED = FIX.verdict_on(Source.installed()).state == "applicable"
SPOILED = Case(
    "spoiled", (FIX.id,), "programs:compare", {"recipe": "delayed", "events": ("failed_capture 5 6", "step")}
)


def test_a_spoiled_capture_leaves_everything_as_it_was() -> None:
    assert outcome(SPOILED, TE_GRAPH_FIXES="on").right


@pytest.mark.skipif(not NEEDED, reason="this TE has the corrected code")
def test_without_the_fix_the_process_is_damaged() -> None:
    assert outcome(SPOILED, TE_GRAPH_FIXES="off").wrong
