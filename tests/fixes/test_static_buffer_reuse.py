"""Test ``static-buffer-reuse`` with inputs that several samples share."""

from __future__ import annotations

import json

import pytest

from tests.support.child import simulate

pytestmark = pytest.mark.te

FIX = "static-buffer-reuse"


@pytest.mark.parametrize("setting", ["on", FIX])
def test_constants_stay_as_the_caller_passes_them(setting: str) -> None:
    """A constant must not share memory with a static input of another layer or microbatch."""
    found = json.loads(simulate("tests/support/shared_constants.py", TE_GRAPH_FIXES=setting).splitlines()[-1])
    assert set(found.values()) == {0.0}, found


def test_without_the_fix_one_overwrites_another() -> None:
    found = json.loads(simulate("tests/support/shared_constants.py", TE_GRAPH_FIXES="off").splitlines()[-1])
    assert len(found) == 6
    assert min(found.values()) > 0.1, found
