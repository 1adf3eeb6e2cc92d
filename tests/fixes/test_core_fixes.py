"""Test three fixes on the simulator. Without them, the same training steps must be wrong as on an H200.

The tests use cases of ``python -m tests.verify``, which run three steps of three microbatches through one graph. Wgrads
are fused into ``main_grad``, and the weights are updated after each step.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.child import measured, run_program
from tests.support.published import TE

pytestmark = pytest.mark.te

SKIP_FLAG, WARMUP, ACCESSORS = "grouped-linear-skip-flag", "warmup-reset", "skip-flag-accessors"
APPLIED = {SKIP_FLAG, WARMUP, ACCESSORS, "stale-fp8-weights", "param-grad-lifetime"}
"""The three tested fixes, and the fixes that `warmup-reset` requires."""

CASES = (
    *("experts-fp8-delayed", "experts-fp8-current", "experts-bf16"),
    *("linear-bf16", "linear-fp8-delayed", "flag-set-by-caller"),
)

LOST = {"outputs": [False, True, True], "dgrads": [False, True, True], "wgrads": [True] * 3}
"""Whether each step is wrong if only the last microbatch reaches ``main_grad``, as on an H200 with TE 2.12."""
STALE = {"outputs": [False, True, True], "dgrads": [False, True, True], "wgrads": [False] * 3}
"""Whether each step is wrong if the weights are never quantized again, as on an H200 with TE 2.15."""
LOST_FP8 = {kind: [True] * 3 for kind in LOST}
"""Whether each step is wrong if wgrads are lost as in `LOST` and, in addition, FP8 scales come from an earlier step."""


def wrong_without(te: TE) -> dict[str, dict[str, list[bool]]]:
    """Return whether each step is wrong on an H200 without fixes, by case and kind of tensor. Omit correct cases."""
    if WARMUP in te.needed:
        wrong = ("experts-fp8-current", "experts-bf16", "linear-bf16")
        return {"experts-fp8-delayed": LOST_FP8, **dict.fromkeys(wrong, LOST)}
    return dict.fromkeys(("experts-fp8-delayed", "experts-fp8-current"), STALE) if SKIP_FLAG in te.needed else {}


def wrong_in(found: dict[str, Any]) -> dict[str, list[bool]]:
    """Return, by kind of tensor, whether each step of a measured case is wrong; {} if its error is 0."""
    return {kind: [error > 0.02 for error in found["measures"]["errors"][kind]] for kind in LOST if found["error"]}


def test_with_the_fixes_no_step_is_wrong(tried_te: TE) -> None:
    fixed = measured(*CASES, path=tried_te.path, TE_GRAPH_FIXES=",".join(sorted(APPLIED)))
    assert {name: set(found["applied"]) for name, found in fixed.items()} == dict.fromkeys(
        CASES, tried_te.needed & APPLIED
    )
    assert {name: found.get("error", found) for name, found in fixed.items()} == dict.fromkeys(CASES, 0.0)


def test_without_the_fixes_the_steps_are_wrong_that_are_on_an_h200(tried_te: TE) -> None:
    without, wanted = measured(*CASES, path=tried_te.path, TE_GRAPH_FIXES="off"), wrong_without(tried_te)
    if ACCESSORS in tried_te.needed:
        missing = "type object 'FP8GlobalStateManager' has no attribute 'set_skip_fp8_weight_update_tensor'"
        assert without.pop("flag-set-by-caller")["detail"] == f"AttributeError: {missing}"
    found = {name: wrong_in(each) for name, each in without.items()}
    assert {name: steps for name, steps in found.items() if steps} == wanted
    for name in wanted:
        norms = without[name]["measures"]["wgrad_norm"]
        if WARMUP in tried_te.needed:  # only the last microbatch reaches main_grad, and its wgrad is the largest
            assert all(0.55 < norm < 0.7 for norm in norms)
        else:
            assert norms == [1.0] * 3


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
