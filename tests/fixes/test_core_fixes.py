"""``grouped-linear-skip-flag``, ``warmup-reset`` and ``skip-flag-accessors`` on the simulator, against an H200.

The cases are those of ``python -m tests.verify``: three steps of three microbatches through one graph, the wgrad fused
into ``main_grad``, an optimizer step between steps.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.child import measured, run_program
from tests.support.published import TE

pytestmark = pytest.mark.te

SKIP_FLAG, WARMUP, ACCESSORS = "grouped-linear-skip-flag", "warmup-reset", "skip-flag-accessors"
APPLIED = {SKIP_FLAG, WARMUP, ACCESSORS, "stale-fp8-weights", "param-grad-lifetime"}
"""Those three, and what `warmup-reset` requires."""

CASES = (
    *("experts-fp8-delayed", "experts-fp8-current", "experts-bf16"),
    *("linear-bf16", "linear-fp8-delayed", "flag-set-by-caller"),
)

LOST = {"outputs": [False, True, True], "dgrads": [False, True, True], "wgrads": [True] * 3}
"""What is wrong in three steps where only the last of three microbatches counts, as on an H200 with TE 2.12."""
STALE = {"outputs": [False, True, True], "dgrads": [False, True, True], "wgrads": [False] * 3}
"""Where the weights are never quantized again, as on an H200 with TE 2.15."""
LOST_FP8 = {kind: [True] * 3 for kind in LOST}
"""As `LOST`, with FP8 scales of an earlier step besides."""


def wrong_without(te: TE) -> dict[str, dict[str, list[bool]]]:
    """Return, by case, the steps that are wrong without the fixes. They are the same as on an H200."""
    if WARMUP in te.needed:
        wrong = ("experts-fp8-current", "experts-bf16", "linear-bf16")
        return {"experts-fp8-delayed": LOST_FP8, **dict.fromkeys(wrong, LOST)}
    return dict.fromkeys(("experts-fp8-delayed", "experts-fp8-current"), STALE) if SKIP_FLAG in te.needed else {}


def measure(te: TE, setting: str, *cases: str, **environment: str) -> dict[str, dict[str, Any]]:
    """Return the measurements of the cases, with ``setting`` in ``TE_GRAPH_FIXES``."""
    return measured(*cases, path=te.path, TE_GRAPH_FIXES=setting, **environment)


@pytest.fixture(scope="module")
def without(tried_te: TE) -> dict[str, dict[str, Any]]:
    return measure(tried_te, "off", *CASES)


@pytest.fixture(scope="module")
def fixed(tried_te: TE) -> dict[str, dict[str, Any]]:
    return measure(tried_te, ",".join(sorted(APPLIED)), *CASES)


@pytest.mark.parametrize("case", CASES)
def test_with_the_fixes_replay_is_eager_bit_for_bit(tried_te: TE, fixed: dict[str, dict[str, Any]], case: str) -> None:
    assert set(fixed[case]["applied"]) == tried_te.needed & APPLIED
    assert (fixed[case]["outcome"], fixed[case].get("error")) == ("measured", 0.0), fixed[case]
    assert fixed[case]["measures"]["wgrad_norm"] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("case", CASES)
def test_without_them_the_steps_are_wrong_that_are_on_a_gpu(
    tried_te: TE, without: dict[str, dict[str, Any]], case: str
) -> None:
    wanted = wrong_without(tried_te)
    if case == "flag-set-by-caller" and ACCESSORS in tried_te.needed:
        missing = "type object 'FP8GlobalStateManager' has no attribute 'set_skip_fp8_weight_update_tensor'"
        assert without[case]["detail"] == f"AttributeError: {missing}"
    elif case not in wanted:
        assert without[case]["error"] == 0.0
    else:
        found = without[case]["measures"]
        assert {kind: [error > 0.02 for error in found["errors"][kind]] for kind in wanted[case]} == wanted[case]
        assert lost(found) if WARMUP in tried_te.needed else found["wgrad_norm"] == [1.0] * 3


def lost(found: dict[str, Any]) -> bool:
    """Return whether each step has lost the wgrads of two of three microbatches, the last of which is the largest."""
    return all(0.55 < norm < 0.7 for norm in found["wgrad_norm"])


def test_the_skip_flag_alone_does_not_help_where_warmup_resets(tried_te: TE) -> None:
    tried_te.require(WARMUP)
    found = measure(tried_te, SKIP_FLAG, "experts-bf16")["experts-bf16"]
    assert found["applied"] == [SKIP_FLAG]
    assert lost(found["measures"])


def test_without_the_skip_flag_the_reset_stays(tried_te: TE) -> None:
    tried_te.require(WARMUP)
    found = measure(tried_te, "on", "experts-bf16", TE_GRAPH_FIXES_DISABLE=SKIP_FLAG)["experts-bf16"]
    assert not {WARMUP, SKIP_FLAG} & set(found["applied"])
    assert lost(found["measures"])


ACCESS = """
Manager.reset()
assert Manager.get_skip_fp8_weight_update_tensor() is None
Manager.set_skip_fp8_weight_update_tensor(True)
tensor = Manager.get_skip_fp8_weight_update_tensor()
assert (tensor.dtype, tensor.shape, float(tensor)) == (torch.float32, (1,), 1.0)
Manager.set_skip_fp8_weight_update_tensor(False)
assert Manager.get_skip_fp8_weight_update_tensor() is tensor and float(tensor) == 0.0
Manager.reset()
assert Manager.get_skip_fp8_weight_update_tensor() is None
"""


def test_the_accessors_of_the_flag(tried_te: TE) -> None:
    run_program(ACCESS, path=tried_te.path)


def test_without_the_fix_they_are_missing(tried_te: TE) -> None:
    tried_te.require(ACCESSORS)
    with pytest.raises(AssertionError, match="has no attribute 'get_skip_fp8_weight_update_tensor'"):
        run_program(ACCESS, path=tried_te.path, TE_GRAPH_FIXES="off")
