"""What has to be refused, with a message that says why: orders, arguments, captures. Taken, it is an error of 1.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.graph import is_graph_capturing

from .driver.program import Program
from .driver.setting import HIDDEN, random, use
from .driver.training import Training


def illegal_order() -> dict[str, Any]:
    """A wgrad before its dgrad. Without `failed-capture-state`, TE goes on as if in a capture after the refusal."""
    use(Program(order=(1, -1.5, -1), fused=True, delay=True))
    try:
        Training(graphed=True)
    except ValueError as refusal:
        refused = [float("_order[1]" not in str(refusal))]
        return {"errors": {"refused": refused}, "message": str(refusal), "damaged": bool(is_graph_capturing())}
    return {"errors": {"refused": [1.0]}, "message": "captured"}


def _linear() -> Any:
    return te.Linear(HIDDEN, HIDDEN, bias=False, params_dtype=torch.bfloat16, device="cuda")


class Named(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """A projection of the sum of what a dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = _linear()

    def forward(self, x: torch.Tensor, *, others: dict[str, torch.Tensor]) -> Any:
        return self.linear(x + others["a"] - 2 * others["b"])


def misused_arguments() -> dict[str, Any]:
    """Arguments of a replay that are not those of the samples (an error of 1.0 for each that is taken)."""
    module = Named()
    a, b, x = random(), random(), random()
    graphed = te.make_graphed_callables(
        module, (x.clone(),), sample_kwargs={"others": {"a": a.clone(), "b": b.clone()}}
    )
    others = {"a": a, "b": b}
    misuses: dict[str, Callable[[], Any]] = {
        "positional by keyword": lambda: graphed(x=x, others=others),
        "missing": lambda: graphed(others=others),
        "one too many": lambda: graphed(x, x, others=others),
        "other order of keys": lambda: graphed(x, others={"b": b, "a": a}),
        "missing key": lambda: graphed(x, others={"a": a}),
        "other shape": lambda: graphed(x[:1], others=others),
        "gradient": lambda: graphed(x.clone().requires_grad_(), others=others),
        "backward of a forward": lambda: _forward_alone(x).sum().backward(),
    }
    taken = {name: float(not _refuses(misuse)) for name, misuse in misuses.items()}
    wrong = not torch.equal(graphed(x, others=others, is_first_microbatch=True), linear_of(module, x, others))
    return {"errors": {"taken": list(taken.values()), "right arguments": [float(wrong)]}, "taken": taken}


def linear_of(module: Named, x: torch.Tensor, others: dict[str, torch.Tensor]) -> Any:
    """What the module computes without its graph."""
    return type(module).forward(module, x, others=others)


def _forward_alone(x: torch.Tensor) -> Any:
    """The output of a graph without a backward."""
    with torch.no_grad():
        graphed = te.make_graphed_callables(_linear(), (x.clone().requires_grad_(),), allow_unused_input=True)
    return graphed(x.clone().requires_grad_())


def _refuses(call: Callable[[], Any]) -> bool:
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as refusal:
        return "captured for" in str(refusal)
    return False
