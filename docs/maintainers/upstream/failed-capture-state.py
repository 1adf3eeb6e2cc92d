"""A capture that fails leaves the process damaged: exits with 1 if anything is not as it was."""

import gc
import sys

import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.graph import is_graph_capturing

SIZE = 64


class Fails(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = te.Linear(SIZE, SIZE, bias=False, params_dtype=torch.bfloat16, device="cuda")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("something that has nothing to do with graphs")
        return self.linear(x)


module = Fails()
call = Fails.__call__
module.linear.weight.grad = torch.ones_like(module.linear.weight)
x = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda").requires_grad_()
seen = "nothing"
try:
    te.make_graphed_callables(module, (x,))
except Exception as error:
    seen = type(error).__name__
damage = {
    "the error is another one": seen != "ValueError",
    "garbage collection is off": not gc.isenabled(),
    "a capture seems to be under way": is_graph_capturing(),
    "the class has another __call__": Fails.__call__ is not call,
    "the parameter has lost its gradient": module.linear.weight.grad is None,
}
print("after a capture that failed:", "; ".join(what for what, is_so in damage.items() if is_so) or "all as before")
sys.exit(any(damage.values()))
