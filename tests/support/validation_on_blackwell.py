"""A block of Mamba's shape in two recipes, validations between its graphs: exits with 1 if they are not eager."""

import sys
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

import te_graph_fixes  # noqa: F401
from tests.simulator import memory

SIZE, TOKENS = 128, 256


class Block(torch.nn.Module):
    """Projection in, depthwise convolution, gate, projection out."""

    def __init__(self) -> None:
        super().__init__()
        options = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda"}
        self.inner = te.LayerNormLinear(SIZE, 2 * SIZE, **options)
        self.conv = torch.nn.Conv1d(SIZE, SIZE, 4, groups=SIZE, padding=3, dtype=torch.bfloat16, device="cuda")
        self.outer = te.Linear(SIZE, SIZE, **options)
        self.is_first_microbatch = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.is_first_microbatch
        x, gate = self.inner(x, is_first_microbatch=first).chunk(2, -1)
        x = self.conv(x.t()[None])[0, :, :TOKENS].t()
        with te.autocast(enabled=True, recipe=recipes.MXFP8BlockScaling()):  # as a recipe by module gives it
            out = self.outer(torch.nn.functional.silu(gate) * x, is_first_microbatch=first)
        self.is_first_microbatch = False
        return out


def random() -> torch.Tensor:
    return torch.randn(TOKENS, SIZE, dtype=torch.bfloat16, device="cuda")


def train(graphed: bool, recipe: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    block = Block()
    run: Any = block
    if graphed:
        sample = (random().requires_grad_(),)
        run = te.make_graphed_callables(block, sample, enabled=True, recipe=recipe, cache_quantized_params=True)
    torch.manual_seed(2)
    found = []
    for _ in range(3):
        block.is_first_microbatch = True
        for microbatch in range(2):
            x, grad = random().requires_grad_(), random()
            with te.autocast(enabled=True, recipe=recipe):
                out = run(x, **({"is_first_microbatch": microbatch == 0} if graphed else {}))
            out.backward(grad)
            found += [out.detach().clone(), x.grad.clone()]
            if graphed:
                memory.overwrite_freed()
        block.eval()
        for microbatch in range(2):
            block.is_first_microbatch = microbatch == 0
            with torch.no_grad(), te.autocast(enabled=True, recipe=recipe):
                found.append(Block.forward(block, random()).clone())
        block.train()
        if graphed:
            memory.overwrite_freed()
        update(block, found)
    return found


def update(block: Block, found: list[torch.Tensor]) -> None:
    for p in block.parameters():
        found.append(p.grad.clone())
        with torch.no_grad():
            p -= 0.1 * p.grad.sign()
        p.grad = None


recipe = recipes.NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=True)
pairs = zip(train(True, recipe), train(False, recipe), strict=True)
sys.exit(not all(torch.equal(graph, eager) for graph, eager in pairs))
