"""Five small defects of graphs: exits with 1 if any of them is there."""

import sys

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

SIZE = 128
wrong = 0


def linear() -> torch.nn.Module:
    torch.manual_seed(1)
    return te.Linear(SIZE, SIZE, bias=False, params_dtype=torch.bfloat16, device="cuda")


x = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda")

graphed = te.make_graphed_callables(linear(), (x.clone(),))
try:
    out = graphed(inp=x)
    wrong += 1
    print(f"graphed(inp=x) returns something, equal to graphed(x): {torch.equal(out, graphed(x))}")
except TypeError as error:
    print(f"graphed(inp=x): {error}")

module = linear()
recipe = DelayedScaling(amax_history_len=4)
te.make_graphed_callables(module, (x.clone(),), enabled=False, calibrating=True, recipe=recipe)
found = module.fp8_meta["recipe"].amax_history_len
wrong += found != 4
print(f"calibrating for a history of 4 amaxes: the graph has {found}")

module = linear()
options = {"enabled": True, "recipe": Float8CurrentScaling(), "cache_quantized_params": True}
te.make_graphed_callables(module, (x.clone(),), **options)
with torch.no_grad(), te.autocast(enabled=True, recipe=Float8CurrentScaling()):
    before = module(x, is_first_microbatch=True).clone()
    module(x, is_first_microbatch=False)
    FP8GlobalStateManager.reset()
    module.weight.neg_()
with torch.no_grad(), te.autocast(enabled=True, recipe=Float8CurrentScaling()):
    after = module(x, is_first_microbatch=True)
wrong += not torch.equal(after, -before)
print(f"after reset(), new weights are used: {torch.equal(after, -before)}")


class Dropout(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            return torch.nn.functional.dropout(x)


tracker = CudaRNGStatesTracker()
tracker.add("model-parallel-rng", 1)
graphed = te.make_graphed_callables(Dropout(), (x.clone(),))
tracker.reset()
tracker.add("model-parallel-rng", 2)
replayed = graphed(x).clone()
tracker.reset()
tracker.add("model-parallel-rng", 2)
equal = torch.equal(replayed, Dropout()(x))
wrong += not equal
print(f"dropout after a reset of the tracker is that of its new seed: {equal}")


def wgrads(together: bool) -> list[torch.Tensor]:
    """The delayed wgrads of two layers, captured by one call or by one each."""
    torch.manual_seed(1)
    options = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda"}
    options |= {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True}
    layers = [te.LayerNormLinear(SIZE, SIZE, **options) for _ in range(2)]
    for layer in layers:
        layer.weight.main_grad = torch.zeros(SIZE, SIZE, device="cuda")
    sample = (torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda", requires_grad=True),)
    for callables in (layers,) if together else ([each] for each in layers):
        te.make_graphed_callables(tuple(callables), (sample,) * len(callables))
    for layer in layers:
        layer.weight.main_grad.zero_()
    out = layers[1](layers[0](x.clone().requires_grad_()))
    out.backward(torch.ones_like(out))
    for layer in layers:
        layer.backward_dw()
    return [layer.weight.main_grad for layer in layers]


equal = all(map(torch.equal, wgrads(True), wgrads(False)))
wrong += not equal
print(f"delayed wgrads of callables captured together are those of callables captured by themselves: {equal}")
sys.exit(wrong > 0)
