"""What a capture leaves behind in the process: eager training after it must be what it was before."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.graph import is_graph_capturing
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from .driver.comparison import error
from .driver.setting import HIDDEN, plain_recipe, random


class PlannedError(Exception):
    """The failure that a case makes."""


class Layer(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """A projection that fails in its ``fails``-th forward from now on, or in the backward of that."""

    fails, in_backward = 0, False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = te.Linear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16, device="cuda")

    def forward(self, x: torch.Tensor) -> Any:
        self.fails -= 1
        out = self.linear(x)
        if self.fails == 0:
            if not self.in_backward:
                raise PlannedError
            out.register_hook(_fail)
        return out


def _fail(_: object) -> None:
    raise PlannedError


class SpecialLayer(Layer):
    """A subclass, as Megatron-Core's MoE layer is one of its dense layer."""


FAILURES: dict[str, tuple[int, bool]] = {
    "the forward": (3, False),
    "the backward": (3, True),
    "warmup": (2, False),
    "the arguments": (0, False),
}
"""Where a capture with a warmup of two iterations fails: in which forward, or its backward, or before any."""


def failed_capture() -> dict[str, Any]:
    """Captures fail: what has changed, and the errors of eager FP8 training after each, and of a graph in the end."""
    recipe = plain_recipe("delayed")
    options = {"num_warmup_iters": 2, "enabled": True, "recipe": recipe}
    FP8GlobalStateManager.reset()
    wanted = _train(Layer(), recipe)
    changed: dict[str, bool] = {}
    errors = []
    for place, (fails, in_backward) in FAILURES.items():
        FP8GlobalStateManager.reset()
        layer = Layer()
        layer.fails, layer.in_backward = fails, in_backward
        sample = random().requires_grad_()
        sample.grad = torch.ones_like(sample)
        modules = (layer,) if fails else (layer, NotAModule())
        with contextlib.suppress(PlannedError, AssertionError, TypeError):
            te.make_graphed_callables(modules, ((sample,),) * len(modules), **options)
        changed |= {
            f"garbage collection after {place}": not gc.isenabled(),
            f"capturing flag after {place}": bool(is_graph_capturing()),
            f"FP8 capturing flag after {place}": bool(FP8GlobalStateManager.fp8_graph_capturing()),
            f"input grads after {place}": sample.grad is None,
            f"hooks after {place}": any(module._forward_hooks for module in layer.modules()),
        }
        errors.append(error(_train(layer, recipe), wanted))
        if any(changed.values()):
            break
    else:
        FP8GlobalStateManager.reset()
        graphed = te.make_graphed_callables(Layer(), (random().requires_grad_(),), **options)
        errors.append(error(_train(graphed, recipe), wanted))
    return {
        "errors": {"changed": [float(sum(changed.values()))], "training": errors},
        "changed": changed,
        "damaged": any(changed.values()),
    }


class NotAModule:
    """What cannot be captured, and is refused once the capture has begun."""

    def modules(self) -> list[object]:
        return []


def subclass_after_capture() -> dict[str, Any]:
    """A layer and one of a subclass are captured in bf16: the errors of eager FP8 calls of the subclass after that.

    ``training`` is of a layer that was not captured, ``evaluation`` of the one that was.
    """
    recipe = plain_recipe("current")
    wanted, captured = _train(SpecialLayer(), recipe), SpecialLayer()
    right = _train(SpecialLayer().eval(), recipe)
    samples = tuple((random().requires_grad_(),) for _ in range(2))
    te.make_graphed_callables((Layer(), captured), samples, enabled=False)
    errors = [error(_train(SpecialLayer(), recipe), wanted), error(_train(captured.eval(), recipe), right)]
    return {"errors": {"training": errors[:1], "evaluation": errors[1:]}, "damaged": any(errors)}


def _train(layer: Layer, recipe: Any) -> list[torch.Tensor]:
    """Outputs and gradients of two microbatches."""
    torch.manual_seed(2)
    found = []
    for _ in range(2):
        x = random().requires_grad_()
        with te.autocast(enabled=True, recipe=recipe):
            out = layer(x)
        out.backward(random())
        assert x.grad is not None
        found += [out.detach().clone(), x.grad.clone()]
        found += [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]
        layer.zero_grad()
    return found
