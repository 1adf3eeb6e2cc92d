"""An evaluation must not remove the FP8 state from the modules of a graph."""

import pytest
import torch
import transformer_engine.pytorch.ops as te_ops
from transformer_engine.common import recipe
from transformer_engine.pytorch import Linear, autocast, is_fp8_available, make_graphed_callables

fp8_available = is_fp8_available()


@pytest.mark.skipif(not fp8_available, reason="FP8 is not supported")
@pytest.mark.parametrize("operation", (False, True))
def test_make_graphed_callables_with_evaluation_without_fp8(operation: bool) -> None:
    """After an evaluation in bf16, replays must run, and checkpoints must contain the FP8 state."""
    fp8_recipe = recipe.DelayedScaling()
    if operation:
        linear = te_ops.Linear(256, 256, bias=False, dtype=torch.bfloat16, device="cuda")
        module = te_ops.Sequential(linear)
    else:
        module = Linear(256, 256, bias=False, params_dtype=torch.bfloat16, device="cuda")
    inp = torch.randn(256, 256, dtype=torch.bfloat16, device="cuda")
    eager = module.forward
    make_graphed_callables(module, (inp.clone().requires_grad_(),), enabled=True, recipe=fp8_recipe)
    graphed = module.forward

    def has_fp8_state() -> bool:
        state = module.state_dict()
        return any(value.numel() for name, value in state.items() if "extra" in name)

    def step() -> bool:
        with autocast(enabled=True, recipe=fp8_recipe):
            out = graphed(inp.clone().requires_grad_())
        out.backward(inp)
        return has_fp8_state()

    before = step()
    module.eval()
    with torch.no_grad():
        eager(inp)
    module.train()
    assert step() == before
