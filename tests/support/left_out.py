"""Programs whose results change if an edit of a fix is omitted. No case of `verify` detects the omission."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformer_engine.pytorch as te

from tests.support import shared_constants
from tests.support.training import BF16, DelayedScaling, Float8CurrentScaling, Manager, WithSplits, linear


def ones() -> torch.Tensor:
    return torch.ones(64, 64, **BF16, requires_grad=True)


def delivered() -> dict[str, Any]:
    """Return the results of `left_after_reset` and, if this TransformerEngine can run it, `delayed_experts`."""
    from transformer_engine.pytorch.module import grouped_linear

    found: dict[str, Any] = {"left": left_after_reset()}
    if hasattr(grouped_linear, "is_module_grouped_tensor_path_supported"):
        found |= delayed_experts()
    return found


def left_after_reset() -> int:
    """Return how many tensors of the weight's shape exist after the reset of a graph with delayed wgrads."""
    layer = te.Linear(64, 48, params_dtype=torch.bfloat16, device="cuda", delay_wgrad_compute=True)
    te.make_graphed_callables(layer, (ones(),))
    layer.reset()
    gc.collect()
    return sum(isinstance(each, torch.Tensor) and each.shape == layer.weight.shape for each in gc.get_objects())


def delayed_experts() -> dict[str, Any]:
    """Return {kind: (hook calls, mean wgrads)} of experts with token counts on the GPU. No case trains such experts."""
    from transformer_engine.pytorch.module import grouped_linear as modules
    from transformer_engine.pytorch.ops.basic import grouped_linear as operations

    modules.is_module_grouped_tensor_path_supported = lambda *_: True  # TE returns True only on Blackwell
    operations.is_op_fuser_grouped_tensor_path_supported = lambda *_: True
    found: dict[str, Any] = {}
    for kind, made, options in (
        ("module", te.GroupedLinear, {"params_dtype": torch.bfloat16, "use_grouped_tensor": True}),
        ("operation", te.ops.GroupedLinear, {"dtype": torch.bfloat16}),
    ):
        experts, called = made(2, 64, 48, bias=False, device="cuda", delay_wgrad_compute=True, **options), []
        experts.register_wgrad_accumulation_and_reduce_hooks(lambda called=called: called.append(1))
        x = ones()
        layer = te.make_graphed_callables(WithSplits(experts, torch.tensor([32, 32], device="cuda")), (x,))
        for _ in range(2):
            layer(x).sum().backward()
            layer.backward_dw()
        found[kind] = len(called), [float(weight.grad.mean()) for weight in experts.parameters()]
    return found


def reductions_in_capture() -> int:
    """Return how often a capture of experts with token counts on the GPU reduces the amaxes of the backward.

    Return 0 if this TransformerEngine has no such experts.
    """
    from transformer_engine.common.recipe import MXFP8BlockScaling
    from transformer_engine.pytorch.module import grouped_linear

    if not hasattr(grouped_linear, "is_module_grouped_tensor_path_supported"):
        return 0
    reduced, reduce = [], Manager.reduce_and_update_fp8_tensors
    Manager.reduce_and_update_fp8_tensors = lambda forward=True: reduced.append(forward) or reduce(forward)
    options = {"params_dtype": torch.bfloat16, "use_grouped_tensor": True, "bias": False, "device": "cuda"}
    layer = WithSplits(te.GroupedLinear(2, 64, 64, **options), torch.tensor([32, 32], device="cuda"))
    te.make_graphed_callables(layer, (ones(),), enabled=True, recipe=MXFP8BlockScaling())
    return reduced.count(False)


def captured_operations() -> int:
    """Capture a `te.ops` operation by itself, and one in a `te.ops.Sequential`. Return 2 if both captures succeed."""
    kinds = [lambda operation: operation, te.ops.Sequential]
    for kind in kinds:
        operation = te.ops.BasicLinear(64, 64, dtype=torch.bfloat16, device="cuda")
        te.make_graphed_callables(kind(operation), (ones(),))
    return len(kinds)


def left_by_a_capture() -> tuple[int, bool]:
    """Return the number of cached weights and the `is_first_microbatch` of a module that is captured without caching.

    Before this capture, another module is captured with cached weights.
    """
    layers = [linear(64) for _ in range(2)]
    forward = layers[1].forward

    def marked(x: torch.Tensor) -> Any:
        layers[1].is_first_microbatch = False
        return forward(x)

    layers[1].forward, layers[1].is_first_microbatch = marked, True
    for layer, cached in zip(layers, (True, False), strict=True):
        options = {"enabled": True, "recipe": Float8CurrentScaling(), "cache_quantized_params": cached}
        te.make_graphed_callables(layer, (ones(),), **options)
    return len(layers[1]._fp8_workspaces), layers[1].is_first_microbatch


def kept_in_recomputations() -> list[float]:
    """Capture a layer with cached weights, then a recomputing one. Return the latter's last dgrad norm in each step."""

    class Layer(te.Linear):
        def forward(self, x: torch.Tensor, **others: Any) -> torch.Tensor:
            first, self.is_first_microbatch = self.is_first_microbatch, False
            out: torch.Tensor = te.checkpoint(lambda x: te.Linear.forward(self, x, is_first_microbatch=first).tanh(), x)
            return out

    options = {"enabled": True, "recipe": DelayedScaling(), "allow_unused_input": True}
    order = {"_order": [1, 1, -1, -1], "_num_layers_per_chunk": [1]}
    found = []
    for given, runs in (({}, 1), (order, 2)):
        torch.manual_seed(1)
        cached, layer = (kind(64, 64, params_dtype=torch.bfloat16, device="cuda") for kind in (te.Linear, Layer))
        layer.is_first_microbatch = True
        samples = [(torch.zeros(64, 64, **BF16, requires_grad=True),) for _ in range(runs)]
        te.make_graphed_callables(cached, samples[0], cache_quantized_params=True, **options)
        graphs = te.make_graphed_callables((layer,), samples, **options, **given)
        for _ in range(3):
            layer.is_first_microbatch = True
            inputs = [torch.randn(64, 64, **BF16, requires_grad=True) for _ in range(2)]
            for graph, x in zip(graphs * (2 // runs), inputs, strict=True):
                with te.autocast(enabled=True, recipe=options["recipe"]):
                    out = graph(x)
                out.sum().backward()
            found.append(float(inputs[1].grad.float().norm()))
            with torch.no_grad():
                layer.weight.mul_(1.5)
    return found


def fills_of_the_shared_flag() -> int:
    """Replay three graphs with cached weights in one autocast. Return how often they fill their shared skip flag."""
    layers = tuple(linear(64) for _ in range(3))
    x = ones()
    options = {"enabled": True, "recipe": Float8CurrentScaling()}
    te.make_graphed_callables(layers, ((x,),) * 3, cache_quantized_params=True, **options)
    flag = getattr(Manager, "quantization_state", Manager).skip_fp8_weight_update_tensor
    before: int = flag._version
    with te.autocast(**options):
        for layer in layers:
            layer(x, is_first_microbatch=True)
    fills: int = flag._version - before
    return fills


def first_microbatches() -> tuple[Any, ...]:
    """Return the results of `left_by_a_capture`, `kept_in_recomputations` and `fills_of_the_shared_flag`."""
    return left_by_a_capture(), kept_in_recomputations(), fills_of_the_shared_flag()


def scales_after_an_evaluation() -> list[float]:
    """Return the scales of a layer after a capture, a training forward and an evaluation.

    The capture is for evaluation and has no warmup.
    """
    layer = linear(64).eval()
    x = torch.ones(64, 64, **BF16)
    options = {"enabled": True, "recipe": DelayedScaling(amax_history_len=1)}
    with torch.no_grad():
        te.make_graphed_callables(layer, (x,), num_warmup_iters=0, **options)
    layer.train()
    with te.autocast(**options):
        layer(x)
    layer.eval()
    with torch.no_grad(), te.autocast(**options):
        layer(x)
    scales: list[float] = layer.fp8_meta["scaling_fwd"].scale.tolist()
    return scales


def numbers_of_the_tracker() -> bool:
    """Return whether a replayed wgrad draws from the generators that the tracker got after the capture."""
    from transformer_engine.pytorch.distributed import CudaRNGStatesTracker

    tracker, drawn = CudaRNGStatesTracker(), torch.zeros(64, device="cuda")
    tracker.add("wgrads", 1)

    class Layer(te.Linear):
        def backward_dw(self) -> None:
            super().backward_dw()
            with tracker.fork("wgrads"):
                drawn.copy_(torch.rand(64, device="cuda"))

    layer = Layer(64, 64, bias=False, params_dtype=torch.bfloat16, device="cuda", delay_wgrad_compute=True)
    sample = ones()
    run = te.make_graphed_callables(layer, (sample,))
    tracker.reset()
    tracker.add("wgrads", 2)
    CudaRNGStatesTracker().add("wgrads", 3)  # the graph does not use this tracker
    run(sample).sum().backward()
    with tracker.fork("wgrads"):
        torch.rand(64, device="cuda")
    run.backward_dw()
    tracker.reset()
    tracker.add("wgrads", 2)
    with tracker.fork("wgrads"):
        return torch.equal(drawn, torch.rand(2, 64, device="cuda")[1])


def weights_held_after_reset() -> int:
    layer = linear(64, bias=False)
    te.make_graphed_callables(layer, (ones(),))
    layer.reset()
    looked_at = [each for each in gc.get_objects() if type(each).__name__ == "Members"]
    return sum(len(each.parameters) for each in looked_at)


def main_grads_after_hooks() -> list[str]:
    """Return the means of ``main_grad`` after two captures with a warmup hook. TE before 2.14 has none, so return [].

    The ``pre_warmup_hook`` of the first does nothing. The ``post_warmup_hook`` of the second zeroes ``main_grad``.
    """
    if "post_warmup_hook" not in inspect.signature(te.make_graphed_callables).parameters:
        return []
    found = []
    for name, zeroes in (("pre_warmup_hook", False), ("post_warmup_hook", True)):
        layer = linear(64, bias=False, fuse_wgrad_accumulation=True)
        weight = layer.weight
        weight.main_grad, weight.grad_added_to_main_grad = torch.full((64, 64), 7.0, device="cuda"), False
        hook = (lambda weight=weight: weight.main_grad.zero_()) if zeroes else (lambda: None)
        te.make_graphed_callables(layer, (ones(),), **{name: hook})
        found.append(str(float(weight.main_grad.mean())))
    return found


OTHERS: dict[str, Callable[[], Any]] = {
    "capture-without-warmup": scales_after_an_evaluation,
    "delayed-wgrad-delivery": delivered,
    "grouped-linear-amax-reduction": reductions_in_capture,
    "replay-contract": weights_held_after_reset,
    "rng-states-at-replay": numbers_of_the_tracker,
    "stale-fp8-weights": first_microbatches,
    "static-buffer-reuse": shared_constants.errors,
    "warmup-main-grads": main_grads_after_hooks,
    "wgrad-hook-order": captured_operations,
}
