"""Run the cases of `verify` that are about a fix without one of its edits, until a case has another result.

`OTHERS` contains programs for edits that change no result of a case.
python -m tests.simulator tests/support/single_edits.py FIX NUMBER prints a line of JSON a case; -1 leaves nothing out.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from collections.abc import Callable
from typing import Any

import te_graph_fixes
from te_graph_fixes.fix import Fix, Verdict
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.source import Source


def leave_out(fix_id: str, number: int) -> None:
    """Omit one edit of a fix from TransformerEngine's import on; ``-1`` omits none."""

    def without_one(source: Source, verdict: Verdict) -> Verdict:
        kept = tuple(edit for place, edit in enumerate(verdict.edits) if place != number)
        return dataclasses.replace(verdict, edits=kept)

    alter(fix_id, without_one)


@dataclasses.dataclass(frozen=True)
class AlteredFix(Fix):
    """A fix whose verdicts are altered."""

    altered: Callable[[Source, Verdict], Verdict] = lambda _, verdict: verdict

    def verdict_on(self, source: Source) -> Verdict:
        return self.altered(source, super().verdict_on(source))


def alter(fix_id: str, altered: Callable[[Source, Verdict], Verdict]) -> None:
    """Change the verdicts of a fix, from TransformerEngine's import on."""
    fields = {field.name: getattr(CATALOGUE[fix_id], field.name) for field in dataclasses.fields(Fix)}
    CATALOGUE[fix_id] = AlteredFix(**fields, altered=altered)


def delivered() -> dict[str, Any]:
    """Return the results of the two functions below, of the second only if this TransformerEngine has such experts."""
    from transformer_engine.pytorch.module import grouped_linear

    found: dict[str, Any] = {"left": left_after_reset()}
    if hasattr(grouped_linear, "is_module_grouped_tensor_path_supported"):
        found |= delayed_experts()
    return found


def left_after_reset() -> int:
    """Return how many tensors of the weight's shape exist after a graph with delayed wgrads was reset."""
    import torch
    import transformer_engine.pytorch as te

    layer = te.Linear(64, 48, params_dtype=torch.bfloat16, device="cuda", delay_wgrad_compute=True)
    te.make_graphed_callables(layer, (torch.ones(64, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True),))
    layer.reset()
    gc.collect()
    return sum(isinstance(each, torch.Tensor) and each.shape == layer.weight.shape for each in gc.get_objects())


def delayed_experts() -> dict[str, Any]:
    """Return hook calls and delayed wgrads of experts whose tokens only the GPU knows. No case trains these."""
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.module import grouped_linear as modules
    from transformer_engine.pytorch.ops.basic import grouped_linear as operations

    modules.is_module_grouped_tensor_path_supported = lambda *_: True  # else on Blackwell only
    operations.is_op_fuser_grouped_tensor_path_supported = lambda *_: True
    found: dict[str, Any] = {}
    for kind, made, options in (
        ("module", te.GroupedLinear, {"params_dtype": torch.bfloat16, "use_grouped_tensor": True}),
        ("operation", te.ops.GroupedLinear, {"dtype": torch.bfloat16}),
    ):
        experts, called = made(2, 64, 48, bias=False, device="cuda", delay_wgrad_compute=True, **options), []
        experts.register_wgrad_accumulation_and_reduce_hooks(lambda called=called: called.append(1))
        x = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        layer = te.make_graphed_callables(with_splits(experts), (x,))
        for _ in range(2):
            layer(x).sum().backward()
            layer.backward_dw()
        found[kind] = len(called), [float(weight.grad.mean()) for weight in experts.parameters()]
    return found


def with_splits(experts: Any) -> Any:
    """Return a layer of two experts that get 32 tokens each, which only the GPU knows."""
    import torch

    splits = torch.tensor([32, 32], device="cuda")

    class Layer(torch.nn.Module):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.experts = experts

        def forward(self, x: torch.Tensor) -> Any:
            return self.experts(x, splits)

    return Layer()


def reductions_in_capture() -> int:
    """Return how often experts whose tokens only the GPU knows reduce the backward's amaxes while they are captured."""
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import MXFP8BlockScaling
    from transformer_engine.pytorch.module import grouped_linear
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    if not hasattr(grouped_linear, "is_module_grouped_tensor_path_supported"):
        return 0
    reduced, reduce = [], FP8GlobalStateManager.reduce_and_update_fp8_tensors
    FP8GlobalStateManager.reduce_and_update_fp8_tensors = lambda forward=True: (
        reduced.append(forward) or reduce(forward)
    )
    options = {"params_dtype": torch.bfloat16, "use_grouped_tensor": True, "bias": False, "device": "cuda"}
    x = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    layer = with_splits(te.GroupedLinear(2, 64, 64, **options))
    te.make_graphed_callables(layer, (x,), enabled=True, recipe=MXFP8BlockScaling())
    return reduced.count(False)


def captured_operations() -> int:
    """Return how many kinds of operations can be captured: one by itself, and some in a `te.ops.Sequential`."""
    import torch
    import transformer_engine.pytorch as te

    sample = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    kinds = [lambda operation: operation, te.ops.Sequential]
    for kind in kinds:
        operation = te.ops.BasicLinear(64, 64, dtype=torch.bfloat16, device="cuda")
        te.make_graphed_callables(kind(operation), (sample,))
    return len(kinds)


def left_by_a_capture() -> tuple[int, bool]:
    """Return the number of cached weights and the mark of a module captured without caches, after one with caches."""
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    layers = [te.Linear(64, 64, params_dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    forward = layers[1].forward

    def marked(x: torch.Tensor) -> Any:
        layers[1].is_first_microbatch = False
        return forward(x)

    layers[1].forward, layers[1].is_first_microbatch = marked, True
    sample = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    for layer, cached in zip(layers, (True, False), strict=True):
        options = {"enabled": True, "recipe": Float8CurrentScaling(), "cache_quantized_params": cached}
        te.make_graphed_callables(layer, (sample,), **options)
    return len(layers[1]._fp8_workspaces), layers[1].is_first_microbatch


def kept_in_recomputations() -> list[float]:
    """Return norms of gradients of second microbatches, recomputed in graphs captured after a graph that caches."""
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling

    class Layer(te.Linear):  # type: ignore[misc,unused-ignore]
        def forward(self, x: torch.Tensor, **others: Any) -> torch.Tensor:
            first, self.is_first_microbatch = self.is_first_microbatch, False
            out: torch.Tensor = te.checkpoint(lambda x: te.Linear.forward(self, x, is_first_microbatch=first).tanh(), x)
            return out

    gpu = {"dtype": torch.bfloat16, "device": "cuda"}
    options = {"enabled": True, "recipe": DelayedScaling(), "allow_unused_input": True}
    order = {"_order": [1, 1, -1, -1], "_num_layers_per_chunk": [1]}
    found = []
    for given, runs in (({}, 1), (order, 2)):
        torch.manual_seed(1)
        cached, layer = (kind(64, 64, params_dtype=torch.bfloat16, device="cuda") for kind in (te.Linear, Layer))
        layer.is_first_microbatch = True
        samples = [(torch.zeros(64, 64, **gpu, requires_grad=True),) for _ in range(runs)]
        te.make_graphed_callables(cached, samples[0], cache_quantized_params=True, **options)
        graphs = te.make_graphed_callables((layer,), samples, **options, **given)
        for _ in range(3):
            layer.is_first_microbatch = True
            inputs = [torch.randn(64, 64, **gpu, requires_grad=True) for _ in range(2)]
            for graph, x in zip(graphs * (2 // runs), inputs, strict=True):
                with te.autocast(enabled=True, recipe=options["recipe"]):
                    out = graph(x)
                out.sum().backward()
            found.append(float(inputs[1].grad.float().norm()))
            with torch.no_grad():
                layer.weight.mul_(1.5)
    return found


def fills_of_the_shared_flag() -> int:
    """Return how often three graphs in one autocast fill the skip flag of captures with cached weights."""
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

    layers = tuple(te.Linear(64, 64, params_dtype=torch.bfloat16, device="cuda") for _ in range(3))
    x = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
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
    """Return the results of the three functions above."""
    return left_by_a_capture(), kept_in_recomputations(), fills_of_the_shared_flag()


def scales_after_an_evaluation() -> list[float]:
    """Return the scales of a layer that was first run by a capture for evaluation without a warmup, after a step."""
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling

    layer = te.Linear(64, 64, params_dtype=torch.bfloat16, device="cuda").eval()
    x = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda")
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
    """Return whether a wgrad that draws random numbers draws those that a tracker got after the capture."""
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.distributed import CudaRNGStatesTracker

    tracker, drawn = CudaRNGStatesTracker(), torch.zeros(64, device="cuda")
    tracker.add("wgrads", 1)

    class Layer(te.Linear):  # type: ignore[misc,unused-ignore]
        def backward_dw(self) -> None:
            super().backward_dw()
            with tracker.fork("wgrads"):
                drawn.copy_(torch.rand(64, device="cuda"))

    layer = Layer(64, 64, bias=False, params_dtype=torch.bfloat16, device="cuda", delay_wgrad_compute=True)
    sample = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    run = te.make_graphed_callables(layer, (sample,))
    tracker.reset()
    tracker.add("wgrads", 2)
    run(sample).sum().backward()
    with tracker.fork("wgrads"):
        torch.rand(64, device="cuda")
    run.backward_dw()
    tracker.reset()
    tracker.add("wgrads", 2)
    with tracker.fork("wgrads"):
        return torch.equal(drawn, torch.rand(2, 64, device="cuda")[1])


def weights_held_after_reset() -> int:
    import torch
    import transformer_engine.pytorch as te

    layer = te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16, device="cuda")
    sample = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    te.make_graphed_callables(layer, (sample,))
    layer.reset()
    looked_at = [each for each in gc.get_objects() if type(each).__name__ == "Members"]
    return sum(len(each.parameters) for each in looked_at)


def shared_constants() -> dict[str, float]:
    from tests.support.shared_constants import errors

    return errors()


def main_grads_after_hooks() -> list[str]:
    """Return ``main_grad`` after captures with warmup hooks, one of which sets it to zero. TE before 2.14 has none."""
    import inspect

    import torch
    import transformer_engine.pytorch as te

    if "post_warmup_hook" not in inspect.signature(te.make_graphed_callables).parameters:
        return []
    found = []
    for name, zeroes in (("pre_warmup_hook", False), ("post_warmup_hook", True)):
        options = {"params_dtype": torch.bfloat16, "device": "cuda", "fuse_wgrad_accumulation": True}
        layer = te.Linear(64, 64, bias=False, **options)
        weight = layer.weight
        weight.main_grad, weight.grad_added_to_main_grad = torch.full((64, 64), 7.0, device="cuda"), False
        hook = (lambda weight=weight: weight.main_grad.zero_()) if zeroes else (lambda: None)
        sample = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        te.make_graphed_callables(layer, (sample,), **{name: hook})
        found.append(str(float(weight.main_grad.mean())))
    return found


OTHERS: dict[str, Callable[[], Any]] = {
    "capture-without-warmup": scales_after_an_evaluation,
    "delayed-wgrad-delivery": delivered,
    "grouped-linear-amax-reduction": reductions_in_capture,
    "replay-contract": weights_held_after_reset,
    "rng-states-at-replay": numbers_of_the_tracker,
    "stale-fp8-weights": first_microbatches,
    "static-buffer-reuse": shared_constants,
    "warmup-main-grads": main_grads_after_hooks,
    "wgrad-hook-order": captured_operations,
}


def main(fix_id: str, number: int) -> None:
    leave_out(fix_id, number)
    import torch
    import transformer_engine.pytorch  # noqa: F401

    from tests.verify.cases import select
    from tests.verify.child import _measure

    figures = {"reserved": 0, "allocated": 0}
    replay = torch.cuda.CUDAGraph.replay

    def measured(graph: Any) -> None:
        replay(graph)
        figures["reserved"] = max(figures["reserved"], torch.cuda.memory_reserved())
        figures["allocated"] = max(figures["allocated"], torch.cuda.memory_allocated())

    torch.cuda.CUDAGraph.replay = measured
    status = te_graph_fixes.report().fixes[fix_id]
    if fix_id in OTHERS and status.status == "applied":
        name = OTHERS[fix_id].__name__
        print(json.dumps({"case": name, "outcome": "measured", "error": 0.0, name: OTHERS[fix_id]()}), flush=True)
    for case in sorted(select([fix_id]), key=lambda case: not case.quick):
        figures.update(dict.fromkeys(figures, 0))
        found = _measure(case) if status.status == "applied" else {"outcome": status.status, "detail": status.reason}
        if found["outcome"] != "skipped":
            result = {name: found[name] for name in ("outcome", "error", "detail") if name in found}
            print(json.dumps({"case": case.name, **result, **figures}), flush=True)
        if found["outcome"] not in ("skipped", "measured") or found.get("error"):
            return


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
