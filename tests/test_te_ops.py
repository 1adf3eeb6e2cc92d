"""The operations of ``te.ops`` in graphs, and their delayed weight gradients: they go through branches of their own."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from te_graph_fixes.source import Source
from tests.child import simulate

OP = Source.installed().find("transformer_engine.pytorch.ops.basic.grouped_linear")
DELAYS = OP is not None and "delay_wgrad_compute" in OP.text


def run(what: str) -> dict[str, Any]:
    return json.loads(simulate(__file__, what, TE_GRAPH_FIXES="on").splitlines()[-1])


@pytest.mark.parametrize("what", ["direct", "sequential"])
def test_operations_can_be_captured(what: str) -> None:
    assert run(what) == {"error": 0.0}


@pytest.mark.skipif(not DELAYS, reason="the grouped operation of this TE does not delay wgrads")
def test_delayed_grads_of_the_grouped_operation_are_added_up() -> None:
    assert run("grouped") == {"error": 0.0}


def main(what: str) -> None:
    import transformer_engine.pytorch as te

    import te_graph_fixes  # noqa: F401

    class Direct(torch.nn.Module):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.op = te.ops.Bias(32, device="cuda")

        def forward(self, x: torch.Tensor) -> Any:
            return self.op(x)

    def train(run: Any, parameters: list[Any], *more: Any, after: Any = None) -> list[Any]:
        torch.manual_seed(2)
        for _ in range(2):
            run(torch.randn(16, 32, device="cuda", requires_grad=True), *more).square().sum().backward()
            if after:
                after()
        return [parameter.grad for parameter in parameters]

    if what == "grouped":
        splits, both = torch.tensor([8, 8], device="cuda"), []
        for delay in (False, True):
            torch.manual_seed(1)
            op = te.ops.GroupedLinear(2, 32, 32, bias=False, device="cuda", delay_wgrad_compute=delay)
            both.append(train(op, [*op.parameters()], splits, after=op.backward_dw if delay else None))
        eager, found = both
    else:
        modules = [
            Direct() if what == "direct" else te.ops.Sequential(te.ops.Bias(32, device="cuda")) for _ in range(2)
        ]
        modules[1].load_state_dict(modules[0].state_dict())
        graphed = te.make_graphed_callables(modules[1], (torch.randn(16, 32, device="cuda", requires_grad=True),))
        eager = train(modules[0], [*modules[0].parameters()])
        found = train(graphed, [*modules[1].parameters()])
    errors = [float((a - b).norm() / a.norm()) for a, b in zip(eager, found, strict=True)]
    print(json.dumps({"error": max(errors)}))


if __name__ == "__main__":
    import sys

    main(sys.argv[1])
