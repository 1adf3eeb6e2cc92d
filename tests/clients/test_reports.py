"""Test that programs of reports that are no bugs of graphs (docs/symptoms.md) are correct with the fixes, or raise."""

from __future__ import annotations

import json

import pytest

from tests.support.child import simulate

pytestmark = pytest.mark.te


def test_programs_from_reports() -> None:
    found = json.loads(simulate("-m", "tests.support.reported_programs", TE_GRAPH_FIXES="on").splitlines()[-1])
    assert "was added, replaced, moved or resized" in found.pop("freed")
    assert found == dict.fromkeys(found, "equal")
