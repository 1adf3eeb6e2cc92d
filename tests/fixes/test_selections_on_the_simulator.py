"""Test that no selection of fixes is worse than TransformerEngine (TE) without fixes in a case of `verify`.

If a selection is worse, one of its fixes needs another fix and must list it in ``requires``. All selections with all
cases take half an hour of one core for each TE, so the quick test runs only cases in which a selection was once worse.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import pytest

from te_graph_fixes.settings import DISABLE, SWITCH
from tests.support import published
from tests.support.child import outcome
from tests.verify.cases import CASES
from tests.verify.runner import Outcome

pytestmark = pytest.mark.te

WORSE = {
    "without stale-fp8-weights": ("weights-not-cached", "experts-not-cached"),
    "without fp8-state-at-replay": ("forward-method-after-others",),
    "only delayed-wgrad-delivery": ("delayed-bias-fp8", "delayed-mlp-bias"),
    "without capture-without-warmup": ("no-warmup",),
    "without nested-autocast": ("nested-operations",),
    "without param-grad-lifetime": ("norm-not-cached", "mlp-not-cached"),
}
NEEDED = sorted(published.te("installed").needed)
SELECTIONS = ["upstream", *(f"{word} {fix_id}" for word in ("without", "only") for fix_id in NEEDED)]
GARBAGE = 15.0
"""An error above this limit comes from uninitialized memory, so it is different in each run."""
OF_OTHERS = ("checkpoints-of-a-chunk",)
"""Cases in which, without `param-grad-lifetime`, other graphs overwrite the gradients."""
ALIKE = 1.01
"""A selection is worse if its error is more than this factor times the error without fixes."""


@functools.cache
def measured(selection: str, name: str) -> Outcome:
    """Run a case with a selection of fixes, or without fixes for ``off``, and return the outcome."""
    word, _, fix_id = selection.partition(" ")
    chosen = {SWITCH: "on", DISABLE: fix_id} if word == "without" else {SWITCH: fix_id or word}
    return outcome(CASES[name], **chosen)


def rank(found: Outcome) -> int:
    """Return 0 for a correct number, 1 for an exception, and 2 for a wrong number, which is the worst outcome."""
    return 0 if found.correct else 2 if found.outcome == "measured" else 1


def is_worse(name: str, found: Outcome, alone: Outcome) -> bool:
    """Return whether an outcome is worse than the outcome without fixes (``alone``).

    All wrong numbers count as equally bad for programs that break a replay precondition and for `OF_OTHERS`, because
    these programs read memory of other graphs.
    """
    if not (found.error and alone.error):
        return rank(found) > rank(alone)
    larger = found.error > ALIKE * alone.error and alone.error <= GARBAGE
    return larger and not CASES[name].options.get("breaks") and name not in OF_OTHERS


def require_no_worse(selection: str, names: Iterable[str]) -> None:
    results = [(name, measured(selection, name), measured("off", name)) for name in names]
    worse = [f"{name}: {alone.text} -> {ours.text}" for name, ours, alone in results if is_worse(name, ours, alone)]
    assert worse == []


@pytest.mark.parametrize("selection", WORSE)
def test_what_was_worse_is_not(selection: str) -> None:
    require_no_worse(selection, WORSE[selection])


@pytest.mark.slow
@pytest.mark.parametrize("selection", SELECTIONS)
def test_no_selection_is_worse(selection: str) -> None:
    require_no_worse(selection, [name for name in CASES if measured("off", name).outcome != "skipped"])
