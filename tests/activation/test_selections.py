"""Test that selecting a fix also selects the fixes that it requires, and that disabling a fix disables its dependents.

tests/fixes/test_selections_on_the_simulator.py tests that each fix lists all fixes that it requires.
"""

from __future__ import annotations

import os
from unittest import mock

import pytest

from te_graph_fixes.decision import Decision, Reading, decide, with_required
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.settings import DISABLE, SWITCH, Settings
from tests.support.published import VERSIONS, examined, needed

TESTED = [version for version in VERSIONS if not version.startswith(("2.7", "2.8", "2.9"))]


def decision(version: str, **variables: str) -> Decision:
    with mock.patch.dict(os.environ, variables):
        return decide(Reading(*examined(version)), Settings.read())


@pytest.mark.parametrize("version", ["2.12.0", VERSIONS[-1]])
def test_disabling_a_fix_disables_the_fixes_that_require_it(version: str) -> None:
    for disabled in needed(version):
        found = decision(version, **{DISABLE: disabled})
        others = {fix_id for fix_id in needed(version) if disabled in with_required([fix_id])} - {disabled}
        assert needed(version).keys() - found.to_apply.keys() == {disabled, *others}
        for fix_id in others:
            reasons = [f"requires {each}, which is disabled" for each in (disabled, *others)]
            assert found.fixes[fix_id].reason in reasons


@pytest.mark.parametrize("version", TESTED)
def test_a_fix_brings_the_fixes_that_it_requires(version: str) -> None:
    for fix_id in needed(version):
        found = decision(version, **{SWITCH: fix_id})
        assert found.to_apply.keys() == with_required([fix_id]) & needed(version).keys()


def test_a_disabled_fix_brings_no_other_fix() -> None:
    found = decision("2.12.0", **{SWITCH: "warmup-reset", DISABLE: "warmup-reset"})
    assert found.to_apply == {}


def test_disabling_a_fix_that_is_not_needed_changes_nothing() -> None:
    assert "grouped-linear-skip-flag" not in needed("2.20.2")
    found = decision("2.20.2", **{DISABLE: "grouped-linear-skip-flag"})
    assert found.to_apply.keys() == needed("2.20.2").keys()


@pytest.mark.parametrize("version", TESTED)
def test_upstream_applies_merged_fixes_and_the_fixes_that_they_require(version: str) -> None:
    merged = {fix_id for fix_id in needed(version) if CATALOGUE[fix_id].merged}
    required = with_required(merged) & needed(version).keys()
    assert decision(version, **{SWITCH: "upstream"}).to_apply.keys() == merged | required
    assert required - merged == ({"stale-fp8-weights"} if "warmup-reset" in merged else set())
