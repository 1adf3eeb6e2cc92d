"""Delayed wgrads (``backward_dw``), eagerly and by graph replay, against eager training without delay.

    python tests/gpu/delayed_wgrad_delivery.py LayerNormLinear fp8-current plain bias pipelined
    TE_GRAPH_FIXES=off python tests/gpu/delayed_wgrad_delivery.py Linear bf16 fused bias single

Prints one JSON line for a case; without arguments, or with a part of one, it runs every case that matches (``-split``:
every one without ``split``). ``fused`` accumulates the gradients of the weights in ``main_grad``, ``plain`` all of them
in ``.grad``. Runs on the simulator too.

``eager`` and ``graph`` are the largest errors of a parameter's gradient over three steps of three microbatches,
``hooks`` that of replay against `backward_dw` run eagerly, where a wgrad hook collects ``.grad`` and sets it to None as
Megatron's DDP does, ``left`` the number of parameters whose ``.grad`` the capture, or a later replay, has changed. All
are 0 where everything is right.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

import te_graph_fixes
from te_graph_fixes.verify.training import make_recipe

HIDDEN = 128
TOKENS = 128
MICROBATCHES = 3
STEPS = 3

RECIPES = ("bf16", "fp8-delayed", "fp8-current", "fp8-block")
KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "block", "split")
"""``split``: query, key and value as parameters of one LayerNormLinear. ``block``: two modules in one callable."""

ORDERS: dict[str, Sequence[float] | None] = {
    "one-graph": None,
    "single": (1, -1, -1.5) * 3,
    "pipelined": (1, 1, 1, -1, -1.5, -1, -1.5, -1, -1.5),
    "late": (1, 1, -1, -1, -1.5, 1, -1.5, -1, -1.5),
    "reused": (1, 1, -1, -1.5, 1, -1, -1.5, -1, -1.5),
}
"""``one-graph`` replays one graph for all microbatches, ``reused`` reuses buffers as Megatron does. ``late`` needs the
fix ``backward-dw-order``, as do all on TE 2.10."""

Grads = dict[str, torch.Tensor]


def build(kind: str, fused: bool, bias: bool, delay: bool) -> tuple[torch.nn.Module, list[Any]]:
    """What is captured, and the TE modules in it; equal arguments give equal weights."""
    torch.manual_seed(1)
    options = {
        "bias": bias,
        "fuse_wgrad_accumulation": fused,
        "delay_wgrad_compute": delay,
        "params_dtype": torch.bfloat16,
        "device": "cuda",
    }
    if kind == "GroupedLinear":
        module = te.GroupedLinear(2, HIDDEN, HIDDEN, **options)
        forward = module.forward
        module.forward = lambda x: forward(x, [TOKENS // 2] * 2)
    elif kind == "LayerNormMLP":
        module = te.LayerNormMLP(HIDDEN, 2 * HIDDEN, **options)
    elif kind == "split":
        module = te.LayerNormLinear(HIDDEN, 3 * HIDDEN, parameters_split=("query", "key", "value"), **options)
    elif kind == "block":
        layers = te.LayerNormLinear(HIDDEN, 2 * HIDDEN, **options), te.Linear(2 * HIDDEN, HIDDEN, **options)
        module = torch.nn.Sequential(*layers)
    else:
        module = getattr(te, kind)(HIDDEN, HIDDEN, **options)
    if fused:  # as Megatron's DDP does, for every parameter
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.grad_added_to_main_grad = False
    return module, list(module) if kind == "block" else [module]


def capture(module: torch.nn.Module, recipe: Any, order_name: str) -> list[Any]:
    """A graphed callable for each microbatch."""
    order = ORDERS[order_name]
    options: dict[str, Any] = {"enabled": recipe is not None, "recipe": recipe, "allow_unused_input": True}
    sample = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    if order is None:
        return [te.make_graphed_callables(module, (sample.requires_grad_(),), **options)] * MICROBATCHES
    options |= {"_order": list(order), "_num_layers_per_chunk": [1]}
    options["_reuse_graph_input_output_buffers"] = order_name == "reused"
    samples = [(sample.clone().requires_grad_(),) for _ in range(MICROBATCHES)]  # not a tuple: TE up to 2.11
    return list(te.make_graphed_callables((module,), samples, **options))


def train(
    kind: str, recipe_name: str, fused: bool, bias: bool, order_name: str, way: str, collect: bool
) -> tuple[Grads, int]:
    """Every gradient after each step, and the number of parameters whose ``.grad`` was changed by other means.

    ``way``: ``direct`` (eager, not delayed), ``eager`` (delayed) or ``graph``. With ``collect`` the wgrad hooks take
    the gradients out of ``.grad``.
    """
    FP8GlobalStateManager.reset()
    recipe = make_recipe(recipe_name)
    module, te_modules = build(kind, fused, bias, delay=way != "direct")
    parameters = dict(module.named_parameters())
    in_main_grad = {name for name, parameter in parameters.items() if fused and parameter.dim() == 2}
    torch.manual_seed(2)
    batches = torch.randn(STEPS, MICROBATCHES, TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    widths = {"split": 3 * HIDDEN}
    output_grads = torch.randn(
        STEPS, MICROBATCHES, TOKENS, widths.get(kind, HIDDEN), dtype=torch.bfloat16, device="cuda"
    )
    collected: Grads = {}

    def collect_grads(names: Sequence[str]) -> Callable[[], None]:
        def hook() -> None:
            for name in names:
                grad = parameters[name].grad
                if grad is not None:
                    collected[name] = collected.get(name, 0) + grad.float()
                    parameters[name].grad = None

        return hook

    plain = [name for name in parameters if name not in in_main_grad]
    if collect:
        for number, te_module in enumerate(te_modules):
            mine = [name for name in plain if kind != "block" or name.startswith(f"{number}.")]
            te_module.register_wgrad_accumulation_and_reduce_hooks(collect_grads(mine))
    runs, left = [module] * MICROBATCHES, 0
    if way == "graph":
        before = {name: torch.full_like(parameter, 7) for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            parameter.grad = before[name]
        runs = capture(module, recipe, order_name)
        left = sum(
            parameter.grad is not before[name] or not bool((parameter.grad == 7).all())
            for name, parameter in parameters.items()
        )
    found: Grads = {}
    kept: Grads = {}
    for step in range(STEPS):
        collected.clear()
        for parameter in parameters.values():
            if step == 1 and parameter.grad is not None:
                parameter.grad.zero_()
            else:
                parameter.grad = None
            if fused:
                parameter.main_grad.zero_()
        counts: dict[float, int] = {}
        outs: dict[int, torch.Tensor] = {}
        for entry in ORDERS[order_name] or (1, -1, -1.5) * MICROBATCHES:
            microbatch = counts.get(entry, 0)
            counts[entry] = microbatch + 1
            if entry > 0:
                x = batches[step, microbatch].clone().requires_grad_()
                with te.autocast(enabled=True, recipe=recipe) if recipe else nullcontext():
                    outs[microbatch] = runs[microbatch](x)
            elif entry % 1 == 0:
                outs.pop(microbatch).backward(output_grads[step, microbatch])
                for name in in_main_grad:
                    parameters[name].grad = None  # a dummy
            elif way == "graph":
                runs[microbatch].backward_dw()
            elif way == "eager":
                for te_module in te_modules:
                    te_module.backward_dw()
        torch.cuda.synchronize()
        for name, parameter in parameters.items():
            grad = parameter.main_grad if name in in_main_grad else collected.get(name) if collect else parameter.grad
            found[f"{name} {step}"] = torch.zeros_like(parameter) if grad is None else grad.clone()
            if step == STEPS - 2 and name not in in_main_grad and parameter.grad is not None:
                kept[name] = parameter.grad
    left += sum(not torch.equal(grad, found[f"{name} {STEPS - 2}"]) for name, grad in kept.items())
    return found, left


def worst(found: Grads, wanted: Grads) -> dict[str, float]:
    """The largest error of each parameter: the norm of the difference over the norm of what is wanted."""
    errors: dict[str, float] = {}
    for key, value in wanted.items():
        name = key.split()[0]
        error = float((found[key].double() - value.double()).norm() / value.double().norm())
        errors[name] = max(errors.get(name, 0.0), error if math.isfinite(error) else math.inf)
    return {name: error for name, error in errors.items() if error}


def measure(kind: str, recipe: str, mode: str, bias: str, order: str) -> dict[str, Any]:
    """The errors of one case; a parameter is named only where it has one."""
    setup = kind, recipe, mode == "fused", bias == "bias", order
    wanted, _ = train(*setup, way="direct", collect=False)
    result: dict[str, Any] = {}
    for name, way, collect in (("eager", "eager", False), ("graph", "graph", False), ("hooks", "graph", True)):
        try:
            if collect:
                wanted, _ = train(*setup, way="eager", collect=True)
            found, left = train(*setup, way=way, collect=collect)
        except Exception as failure:
            result["failed"] = f"{name}: {type(failure).__name__}: {' '.join(str(failure).split())[:150]}"
            break
        errors = worst(found, wanted)
        result[name] = max(errors.values(), default=0.0)
        if errors:
            result.setdefault("parameters", {})[name] = errors
        if name == "graph":
            result["left"] = left
    return result


def cases(wanted: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Every case that has all of the words in ``wanted``, and none of those with a minus sign."""
    refused = {word[1:] for word in wanted if word.startswith("-")}
    wanted = [word for word in wanted if not word.startswith("-")]
    for case in itertools.product(KINDS, RECIPES, ("plain", "fused"), ("bias", "nobias"), ORDERS):
        if case[0] == "split" and case[2] == "fused":
            continue  # TE concatenates split weights, and the result has no main_grad
        if set(wanted) <= set(case) and not refused & set(case):
            yield case


def main(wanted: Sequence[str]) -> None:
    report = te_graph_fixes.report()
    applied = [fix for fix, status in report.fixes.items() if status.status == "applied"]
    for case in cases(wanted):
        result = measure(*case)
        print(json.dumps({"te": report.te_version, "case": case, "applied": applied, **result}), flush=True)
        if "failed" in result:
            sys.exit("a failure in a capture damages the process")


if __name__ == "__main__":
    main(sys.argv[1:])
