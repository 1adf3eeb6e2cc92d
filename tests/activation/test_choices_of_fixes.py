"""What the settings choose: a fix goes only with what it requires, and no choice is worse than TransformerEngine alone.

`tools.choices_of_fixes` measures that; what it found worse has a requirement here, and a case that was worse in
`tests/fixes/test_choices_of_fixes_on_the_simulator.py`.
"""

from __future__ import annotations

import pytest

from te_graph_fixes.decision import Decision, with_required
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.settings import DISABLE, SWITCH, Settings
from te_graph_fixes.status import Status
from tests.support.published import VERSIONS, examined, needed

TESTED = [version for version in VERSIONS if not version.startswith(("2.7", "2.8", "2.9"))]


def decision(version: str, **variables: str) -> Decision:
    source, found = examined(version)
    return Decision(source, Settings.read(environ=variables), found)


@pytest.mark.parametrize(
    ("left_out", "with_it"),
    [
        ("stale-fp8-weights", ["warmup-reset", "skip-flag-reset"]),
        ("grouped-linear-skip-flag", ["warmup-reset", "stale-fp8-weights", "skip-flag-reset"]),
        ("capture-without-warmup", ["backward-dw-order"]),
        ("wgrad-without-dgrad", ["delayed-wgrad-delivery"]),
        ("fp8-state-at-replay", ["state-after-evaluation"]),
        ("nested-autocast", ["fp8-state-at-replay", "state-after-evaluation"]),
        ("param-grad-lifetime", ["warmup-reset", "delayed-wgrad-delivery"]),
    ],
)
def test_what_requires_a_fix_is_left_out_with_it(left_out: str, with_it: list[str]) -> None:
    found = decision("2.12.0", **{DISABLE: left_out})
    assert needed("2.12.0").keys() - found.to_apply.keys() == {left_out, *with_it}
    for fix_id in with_it:
        assert found.decisions[fix_id].status == Status.DISABLED
        reasons = [f"it requires {each}, which is disabled" for each in (left_out, *with_it)]
        assert found.decisions[fix_id].reason.startswith(tuple(reasons))


@pytest.mark.parametrize("version", TESTED)
def test_upstream_applies_what_is_merged_and_what_that_requires(version: str) -> None:
    merged = {fix_id for fix_id in needed(version) if CATALOGUE[fix_id].merged}
    required = set[str]().union(*map(with_required, merged)) & needed(version).keys()
    assert decision(version, **{SWITCH: "upstream"}).to_apply.keys() == merged | required
    assert required - merged == ({"stale-fp8-weights"} if "warmup-reset" in merged else set())


def test_upstream_without_what_a_merged_correction_requires() -> None:
    found = decision("2.12.0", **{SWITCH: "upstream", DISABLE: "stale-fp8-weights"})
    assert not {"warmup-reset", "stale-fp8-weights"} & found.to_apply.keys()
    assert found.decisions["warmup-reset"].reason.startswith("it requires stale-fp8-weights, which is disabled")
    assert "param-grad-lifetime" in found.to_apply
