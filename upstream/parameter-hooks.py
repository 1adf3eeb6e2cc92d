"""Hooks of parameters must run at replays, but not in warmup and capture."""

import pytest
import torch
from transformer_engine.pytorch import Linear, make_graphed_callables


@pytest.mark.parametrize("frees_grad", (False, True))
def test_make_graphed_callables_runs_parameter_hooks_once(frees_grad: bool) -> None:
    """Each replay must call a hook once, with the gradient of that replay."""
    sums, calls = [], []
    for graphed in (False, True):
        torch.manual_seed(1)
        layer = Linear(128, 128, bias=False, params_dtype=torch.bfloat16, device="cuda")
        total, called = torch.zeros(128, 128, device="cuda"), []

        def hook(param: torch.Tensor, total=total, called=called) -> None:
            called.append(param)
            total.add_(param.grad)
            if frees_grad:
                param.grad = None

        layer.weight.register_post_accumulate_grad_hook(hook)
        run = layer
        if graphed:
            sample = torch.randn(64, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            run = make_graphed_callables(layer, (sample,))
            assert not called, "the hook ran in warmup or capture"
        torch.manual_seed(2)
        for _ in range(3):
            inp = torch.randn(64, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            out = run(inp)
            out.backward(torch.randn_like(out))
            layer.weight.grad = None
        sums.append(total)
        calls.append(len(called))
    assert calls == [3, 3]
    assert torch.equal(*sums)
