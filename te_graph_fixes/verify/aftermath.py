"""What a capture leaves behind in the process: eager training after it must be what it was before."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.graph import is_graph_capturing
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from .training import HIDDEN, TOKENS, error, make_recipe


class PlannedError(Exception):
    """The failure that a case makes."""


class Layer(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """A projection that fails in its ``fails``-th forward from now on."""

    fails = 0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = te.Linear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16, device="cuda")

    def forward(self, x: torch.Tensor) -> Any:
        self.fails -= 1
        if self.fails == 0:
            raise PlannedError
        return self.linear(x)


class SpecialLayer(Layer):
    """A subclass, as Megatron-Core's MoE layer is one of its dense layer."""


def failed_capture() -> dict[str, Any]:
    """A capture fails in its forward, after warmup: what has changed, and the errors of eager FP8 training after it."""
    recipe = make_recipe("fp8-delayed")
    FP8GlobalStateManager.reset()
    wanted = _train(Layer(), recipe)
    FP8GlobalStateManager.reset()
    layer = Layer()
    sample = _random().requires_grad_()
    sample.grad = torch.ones_like(sample)
    layer.fails = 3
    with contextlib.suppress(PlannedError):
        te.make_graphed_callables(layer, (sample,), num_warmup_iters=2, enabled=True, recipe=recipe)
    changed = {
        "garbage collection": not gc.isenabled(),
        "capturing flag": bool(is_graph_capturing()),
        "FP8 capturing flag": bool(FP8GlobalStateManager.fp8_graph_capturing()),
        "input grads": sample.grad is None,
    }
    found = _train(layer, recipe)
    return {
        "errors": {"changed": [float(sum(changed.values()))], "training": [error(found, wanted)]},
        "changed": changed,
        "damaged": any(changed.values()),
    }


def subclass_after_capture() -> dict[str, Any]:
    """A layer and one of a subclass are captured in bf16: the errors of another one's eager FP8 training after that."""
    recipe = make_recipe("fp8-current")
    wanted = _train(SpecialLayer(), recipe)
    samples = tuple((_random().requires_grad_(),) for _ in range(2))
    te.make_graphed_callables((Layer(), SpecialLayer()), samples, enabled=False)
    wrong = error(_train(SpecialLayer(), recipe), wanted)
    return {"errors": {"training": [wrong]}, "damaged": bool(wrong)}


def _random() -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")


def _train(layer: Layer, recipe: Any) -> list[torch.Tensor]:
    """Outputs and gradients of two microbatches."""
    torch.manual_seed(2)
    found = []
    for _ in range(2):
        x = _random().requires_grad_()
        with te.autocast(enabled=True, recipe=recipe):
            out = layer(x)
        out.backward(_random())
        assert x.grad is not None
        found += [out.detach().clone(), x.grad.clone()]
    return found + [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]
