"""Modules of a captured subclass keep the capture's autocast: exits with 1 if an eager one loses FP8."""

import sys

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

SIZE = 128
RECIPE = Float8CurrentScaling()


class Base(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = te.Linear(SIZE, SIZE, bias=False, params_dtype=torch.bfloat16, device="cuda")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Derived(Base):
    pass


torch.manual_seed(2)
x = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
eager = Derived()
outputs = []
for captured in (False, True):
    if captured:
        samples = tuple((x.clone().requires_grad_(),) for _ in range(2))
        te.make_graphed_callables((Base(), Derived()), samples, enabled=True, recipe=RECIPE)
    with te.autocast(enabled=True, recipe=RECIPE):
        outputs.append(eager(x).detach().float().clone())
error = float((outputs[1] - outputs[0]).norm() / outputs[0].norm())
print(f"an eager module after the capture of its class: outputs are off by {error:.3f} of their norm")
sys.exit(error > 0)
