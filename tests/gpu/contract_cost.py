"""What ``replay-contract`` costs: prints one line for each way of training.

    python tests/gpu/contract_cost.py [SECONDS FOR EACH]

Four transformer layers with fused wgrads, in an order and without one; small, as a step that waits for the host, and
large. Where megatron-core is installed, also the step of a GPT of it (`examples/megatron_moe.py`). Both settings, all
fixes and all but this one, are captured twice in this process, and their steps take turns. The microseconds are what
the fix adds on the host to a replay, the ratio is the time of a step with it over that without, until the GPU is done;
each is the median of the rounds, with its 95 % interval. What two captures of one setting differ by says how much of
that is chance; it is mostly more than the fix takes. So a clock is set around the fix's calls, too: what they take in
the median step, less what the clock takes around empty functions. What stands in TE's text in front of a forward that
needs no call, a comparison and a mark on its outputs, is not among it.
"""

from __future__ import annotations

import gc
import importlib.util
import math
import runpy
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te

import te_graph_fixes

FIX = "replay-contract"
MODULE = "transformer_engine.pytorch._te_replay_contract"
SMALL, LARGE = (1024, 512), (4096, 4096)
"""Hidden size and tokens."""
LAYERS = 4
SECONDS = 14.0
STEPS_CLOCKED = 60
EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron_moe.py"
DENSE = {"num_moe_experts": None, "moe_ffn_hidden_size": None, "moe_grouped_gemm": False}

Step = Callable[[], None]


def of_layers(in_order: bool, microbatches: int, hidden: int, tokens: int) -> Step:
    """What runs one step of new layers; a step has 2 * LAYERS * microbatches replays."""
    options: dict[str, Any] = {"params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": True, "fuse_qkv_params": True}
    options |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    layers = [te.TransformerLayer(hidden, 4 * hidden, hidden // 64, **options).cuda() for _ in range(LAYERS)]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.grad_added_to_main_grad = False

    def sample() -> tuple[torch.Tensor]:
        return (torch.zeros(tokens, 1, hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True),)

    if in_order:
        samples = [sample() for _ in range(LAYERS * microbatches)]
        kwargs: list[dict[str, Any]] = [{} for _ in samples]
        order = [1] * microbatches + [-1] * microbatches
        placing = {"_order": order, "_num_layers_per_chunk": [LAYERS], "_reuse_graph_input_output_buffers": True}
        graphs = te.make_graphed_callables(tuple(layers), samples, sample_kwargs=kwargs, **placing)
        chunks = [graphs[LAYERS * number : LAYERS * (number + 1)] for number in range(microbatches)]
    else:
        graphs = te.make_graphed_callables(tuple(layers), tuple(sample() for _ in layers))
        chunks = [graphs] * microbatches
    xs = [torch.randn_like(sample()[0]) for _ in range(microbatches)]
    output_grad = torch.randn_like(xs[0])
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    main_grads = [parameter.main_grad for parameter in parameters]
    masters = [parameter.detach().float() for parameter in parameters]

    def step() -> None:
        outputs = []
        for graphs, x in zip(chunks, xs, strict=True):
            x = x.requires_grad_()
            for graph in graphs:
                x = graph(x)
            outputs.append(x)
            if not in_order:
                outputs.pop().backward(output_grad)
        for output in outputs:
            output.backward(output_grad)
        with torch.no_grad():
            torch._foreach_add_(masters, main_grads, alpha=-1e-6)
            torch._foreach_copy_(parameters, masters)
            torch._foreach_zero_(main_grads)
        for parameter in (*xs, *parameters):
            parameter.grad = None

    return step


def of_megatron(example: dict[str, Any], microbatches: int, **changed: Any) -> Step:
    """What runs one step of a new GPT of four layers, with hidden size 1024, in microbatches of 512 tokens."""
    from megatron.core.num_microbatches_calculator import reconfigure_num_microbatches_calculator

    reconfigure_num_microbatches_calculator(0, None, microbatches, 1, 1)
    names = example["build"].__globals__
    names["LAYERS"], names["MICROBATCHES"], (names["HIDDEN"], names["TOKENS"]) = LAYERS, microbatches, SMALL
    gpt, model = example["build"]("bf16", True, **changed)
    data = [*example["batches"](0)]

    def step() -> None:
        example["step"](model, iter(data))
        example["update"](gpt)

    return step


def seconds(step: Callable[[], None]) -> tuple[float, float]:
    """Until the host has issued a step, and until the GPU has done it."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    issued = time.perf_counter()
    torch.cuda.synchronize()
    return issued - began, time.perf_counter() - began


def median(values: list[float]) -> str:
    """The median and its 95 % interval."""
    found, reach = sorted(values), 0.98 * math.sqrt(len(values))
    least, most = (found[round(place)] for place in (len(found) / 2 - reach, len(found) / 2 + reach - 1))
    return f"{statistics.median(found):.4f} [{least:.4f}, {most:.4f}]"


def clocked(step: Step, contract: Any) -> float:
    """Microseconds that a step spends in the fix's calls, methods of its class ``contract``."""
    real = {name: getattr(contract, name) for name in ("look_forward", "before_backward")}
    calls: list[list[int]] = []
    for functions in (real, dict.fromkeys(real, lambda *_: None)):
        times: list[int] = []
        for name, function in functions.items():
            setattr(contract, name, timed(function, times))
        steps = []
        for _ in range(STEPS_CLOCKED):
            times.clear()
            step()
            steps.append([*times])
        calls.append(sorted(steps, key=sum)[STEPS_CLOCKED // 2])
    for name, function in real.items():
        setattr(contract, name, function)
    # Without the calls no forward is known to be the next one, so there are more of the empty ones.
    of_clock = statistics.median(calls[1]) * len(calls[0])
    return (sum(calls[0]) - of_clock) / 1000


def timed(function: Callable[..., None], times: list[int]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        began = time.perf_counter_ns()
        function(*args)
        times.append(time.perf_counter_ns() - began)

    return call


def captured(with_fix: bool, build: Callable[[], Step]) -> tuple[Step, Any]:
    """What runs a step, and the class that the fix has in its graphs."""
    te_graph_fixes.deactivate()
    te_graph_fixes.activate(disable=[] if with_fix else [FIX])
    step, module = build(), sys.modules.get(MODULE)
    if module is None:
        return step, None
    module.LOOKS = 0  # the first ones are over
    return step, module.Contract


def compare(build: Callable[[], Step], microbatches: int, limit: float) -> str:
    """Times of steps without the fix, with it, with it and without it, captured in this sequence."""
    captures = [captured(with_fix, build) for with_fix in (False, True, True, False)]
    steps = [step for step, _ in captures]
    for _ in range(5):
        for step in steps:
            step()
    gc.collect()
    gc.disable()
    rounds: list[list[tuple[float, float]]] = []
    end = time.monotonic() + limit
    while time.monotonic() < end or len(rounds) < 8:
        first = len(rounds) % len(steps)
        times = {number: seconds(steps[number]) for number in (*range(first, len(steps)), *range(first))}
        rounds.append([times[number] for number in range(len(steps))])
    in_calls = clocked(*captures[1])
    gc.enable()
    replays = 2 * LAYERS * microbatches
    added = median([1e6 * (b[0] + c[0] - a[0] - d[0]) / 2 / replays for a, b, c, d in rounds])
    ratio = median([(b[1] + c[1]) / (a[1] + d[1]) for a, b, c, d in rounds])
    same = median([1e6 * (d[0] - a[0]) / replays for a, _, _, d in rounds])
    same_with = median([1e6 * (c[0] - b[0]) / replays for _, b, c, _ in rounds])
    step_ms = 1000 * statistics.median(a[1] for a, *_ in rounds)
    return (
        f"step {step_ms:.2f} ms; in the fix's calls {in_calls / replays:.2f} microseconds a replay, "
        f"{in_calls / step_ms / 10:.2f} % of the step; {len(rounds)} rounds, ratio {ratio}, "
        f"microseconds a replay {added}; between two captures of one setting: without {same}, with {same_with}"
    )


def main(limit: float) -> None:
    warnings.simplefilter("ignore")  # graphs of the other setting go on as they are
    print("TE", te_graph_fixes.report().te_version, torch.cuda.get_device_name())

    def show(what: str, microbatches: int, build: Callable[[], Step]) -> None:
        print(f"{what}, {microbatches} microbatches: {compare(build, microbatches, limit)}", flush=True)

    for microbatches in (4, 8, 16):
        show("small, in an order", microbatches, lambda n=microbatches: of_layers(True, n, *SMALL))
    show("small, without one", 4, lambda: of_layers(False, 4, *SMALL))
    show("large, in an order", 4, lambda: of_layers(True, 4, *LARGE))
    if importlib.util.find_spec("megatron.core"):
        example = runpy.run_path(str(EXAMPLE))
        example["start"]()
        for name, changed in {"dense": DENSE, "MoE": {}}.items():
            for microbatches in (4, 16):
                build = lambda n=microbatches, c=changed: of_megatron(example, n, **c)  # noqa: E731
                show(f"Megatron-Core, {name}", microbatches, build)


if __name__ == "__main__":
    main(float(sys.argv[1]) if sys.argv[1:] else SECONDS)
