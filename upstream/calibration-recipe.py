"""A capture that only calibrates must use the caller's recipe."""

import pytest
import torch
from transformer_engine.common import recipe
from transformer_engine.pytorch import Linear, is_fp8_available, make_graphed_callables

fp8_available = is_fp8_available()


@pytest.mark.skipif(not fp8_available, reason="FP8 is not supported")
def test_make_graphed_callables_calibrates_for_given_recipe() -> None:
    """With ``calibrating=True`` and ``enabled=False``, the capture must use the given recipe."""
    module = Linear(128, 128, params_dtype=torch.bfloat16, device="cuda")
    inp = torch.randn(128, 128, dtype=torch.bfloat16, device="cuda")
    make_graphed_callables(
        module,
        (inp,),
        enabled=False,
        calibrating=True,
        recipe=recipe.DelayedScaling(amax_history_len=4),
    )
    assert module.fp8_meta["recipe"].amax_history_len == 4
