"""What the driver has no program for: parameters that are inputs, and what is only warned of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformer_engine.pytorch as te

from .driver.comparison import error
from .driver.setting import HIDDEN, TOKENS, plain_recipe, random, sample


class Hidden(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """A module without parameters of its own, which come as inputs."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = [inner]
        self.names = [name for name, _ in inner.named_parameters()]

    def forward(self, x: torch.Tensor, *parameters: torch.Tensor) -> Any:
        return torch.func.functional_call(self.inner[0], dict(zip(self.names, parameters, strict=True)), (x,))


def parameters_as_inputs() -> dict[str, Any]:
    """Parameters that are passed as inputs, as NeMo Automodel does: the error of their gradients."""
    return {"errors": {"wgrads": [error(*(_grads(graphed) for graphed in (True, False)))]}}


def _grads(graphed: bool) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    inner = torch.nn.Linear(HIDDEN, HIDDEN, dtype=torch.bfloat16, device="cuda")
    parameters = list(inner.parameters())
    run: Any = Hidden(inner)
    if graphed:
        samples = ((sample().requires_grad_(), *parameters),)
        (run,) = te.make_graphed_callables((run,), samples, enabled=(False,), retain_graph_in_backward=True)
    torch.manual_seed(1)
    for _ in range(3):
        run(random().requires_grad_(), *parameters).backward(random())
    return [parameter.grad for parameter in parameters]


def cast_input() -> dict[str, Any]:
    """An fp32 input for a bf16 graph."""
    return _warned("it casts them", lambda graph: graph(torch.randn(TOKENS, HIDDEN, device="cuda")))


def outside_of_the_autocast() -> dict[str, Any]:
    """A graph in FP8 that is run outside of an autocast."""
    options = {"enabled": True, "recipe": plain_recipe("current")}
    return _warned("outside of an autocast", torch.no_grad()(lambda graph: graph(random())), options)


def _warned(words: str, run: Callable[[Any], Any], options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run a graph twice: an error of 1.0 unless just one warning has these words."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            module = te.Linear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16, device="cuda")
            run(te.make_graphed_callables(module, (sample().requires_grad_(),), **(options or {})))
    texts = [str(warning.message) for warning in found if words in str(warning.message)]
    return {"errors": {"warned": [float(len(texts) != 1)]}, "messages": texts}
