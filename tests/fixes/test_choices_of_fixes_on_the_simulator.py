"""Test that no choice of fixes is worse than TransformerEngine alone, with cases in which one was.

All cases with all choices take half an hour of one core for each TransformerEngine.
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


@pytest.mark.parametrize("choice", WORSE)
def test_what_was_worse_is_not(choice: str) -> None:
    done = on_simulator("-m", "tools.choices_of_fixes", choice, "--cases", *WORSE[choice], imported=())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_no_choice_is_worse() -> None:
    done = python("-m", "tools.choices_of_fixes", "--workers", "2", timeout=7200)
    assert done.returncode == 0, done.stdout + done.stderr
