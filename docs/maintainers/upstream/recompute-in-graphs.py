"""te.checkpoint in a graph, delayed scaling: exits with 1 if scales differ from those of eager training."""

import sys
from contextlib import nullcontext

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

SIZE = 128
RECIPE = DelayedScaling()


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = te.Linear(SIZE, SIZE, bias=False, params_dtype=torch.bfloat16, device="cuda")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return te.checkpoint(self.inner, x)


def scales(graphed: bool, behind: bool) -> list[torch.Tensor]:
    """The scales and amax histories, forward and backward, after two microbatches."""
    FP8GlobalStateManager.reset()
    torch.manual_seed(1)
    other, block = (kind() for kind in (Block, Block))
    if graphed:
        sample = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        te.make_graphed_callables(block, (sample,), enabled=True, recipe=RECIPE)
    torch.manual_seed(2)
    for _ in range(2):
        x = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        with (
            nullcontext() if behind else te.autocast(enabled=False),
            te.autocast(enabled=True, recipe=RECIPE),
        ):
            if behind:
                other.inner(x.detach())
            out = block(x)
        out.backward(torch.ones_like(out))
    states = [block.inner.fp8_meta[key] for key in ("scaling_fwd", "scaling_bwd")]
    return [tensor for state in states for tensor in (state.scale, state.amax_history)]


wrong = False
for name, behind in {"behind a module without a backward": True, "in an autocast inside another": False}.items():
    same = [torch.equal(*pair) for pair in zip(scales(True, behind), scales(False, behind), strict=True)]
    print(f"{name}: {sum(same)} of {len(same)} scales are those of eager training")
    wrong = wrong or not all(same)
sys.exit(wrong)
