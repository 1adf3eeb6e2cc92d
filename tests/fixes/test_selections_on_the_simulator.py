"""Test that no selection of fixes is worse than TransformerEngine alone, with cases in which one was.

All cases with all selections take half an hour of one core for each TransformerEngine.
"""

from __future__ import annotations

import pytest

from tests.support.child import on_simulator, python

pytestmark = pytest.mark.te

WORSE = {
    "without stale-fp8-weights": ("weights-not-cached", "experts-not-cached"),
    "without fp8-state-at-replay": ("forward-method-after-others",),
    "only delayed-wgrad-delivery": ("delayed-bias-fp8", "delayed-mlp-bias"),
    "without capture-without-warmup": ("no-warmup",),
    "without nested-autocast": ("nested-operations",),
    "without param-grad-lifetime": ("norm-not-cached", "mlp-not-cached"),
}


@pytest.mark.parametrize("selection", WORSE)
def test_what_was_worse_is_not(selection: str) -> None:
    done = on_simulator("-m", "tools.selections", selection, "--cases", *WORSE[selection], imported=())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_no_selection_is_worse() -> None:
    done = python("-m", "tools.selections", "--workers", "2", timeout=7200)
    assert done.returncode == 0, done.stdout + done.stderr
