"""Measure the cost of ``replay-contract``: print one line for each way of training.

    python tests/gpu/contract_cost.py [SECONDS FOR EACH]

Four transformer layers with fused wgrads, with a schedule and without; small, so that a step waits for the host, and
large. If megatron-core is installed, also a GPT of Megatron-Core (`examples/megatron_moe.py`). The graphs are captured
once, because two captures of one setting differ by more than the cost of the fix. Steps alternate with and without the
lines of the fix in the functions that a replay runs. Microseconds are the time that these lines add on the host to a
replay. The ratio is the time of a step with the fix over the time without, until the GPU is done. Both are medians of
the rounds, with 95 % intervals. The calls of the fix are also timed: in the median step, less the time of empty
functions. Needs Python 3.11.
"""

from __future__ import annotations

import ast
import functools
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
from types import CodeType, FunctionType
from typing import Any

import torch
import transformer_engine.pytorch as te

import te_graph_fixes
from te_graph_fixes.decision import decide, read
from te_graph_fixes.patching.installation import code_parts, patched
from te_graph_fixes.patching.source import Source
from te_graph_fixes.settings import Settings

AT_A_REPLAY = {
    f"_make_graphed_callables.<locals>.make_graphed_autograd_function.<locals>.{name}"
    for name in ("functionalized", "Graphed.forward", "Graphed.backward")
}
"""The functions of TE's ``graph.py`` that a replay runs."""
FIX = "replay-contract"
GRAPH, MODULE = "transformer_engine.pytorch.graph", "transformer_engine.pytorch._te_replay_contract"
TINY, SMALL, LARGE = (512, 512), (1024, 512), (4096, 4096)
"""Hidden size and tokens."""
LAYERS = 4
SECONDS = 14.0
STEPS_CLOCKED = 60
EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron_moe.py"
DENSE = {"num_moe_experts": None, "moe_ffn_hidden_size": None, "moe_grouped_gemm": False}

Step = Callable[[], None]


def of_layers(in_order: bool, microbatches: int, hidden: int, tokens: int) -> Step:
    """Return a function that runs one step of new layers; a step has 2 * LAYERS * microbatches replays."""
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


def of_megatron(example: dict[str, Any], microbatches: int, hidden: int, tokens: int, **changed: Any) -> Step:
    """Return a function that runs one step of a new GPT of four layers."""
    from megatron.core.num_microbatches_calculator import reconfigure_num_microbatches_calculator

    reconfigure_num_microbatches_calculator(0, None, microbatches, 1, 1)
    names = example["build"].__globals__
    names["LAYERS"], names["MICROBATCHES"], names["HIDDEN"], names["TOKENS"] = LAYERS, microbatches, hidden, tokens
    gpt, model = example["build"]("bf16", True, **changed)
    data = [*example["batches"](0)]

    def step() -> None:
        example["step"](model, iter(data))
        example["update"](gpt)

    return step


def seconds(step: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds until the host has issued a step, and until the GPU has done it."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    issued = time.perf_counter()
    torch.cuda.synchronize()
    return issued - began, time.perf_counter() - began


def median(values: list[float]) -> str:
    """Return the median and its 95 % interval as text."""
    found, reach = sorted(values), 0.98 * math.sqrt(len(values))
    least, most = (found[round(place)] for place in (len(found) / 2 - reach, len(found) / 2 + reach - 1))
    return f"{statistics.median(found):.4f} [{least:.4f}, {most:.4f}]"


def clocked(step: Step, contract: Any) -> dict[str, float]:
    """Return the microseconds that a step spends in the calls of the fix, by method of its class ``contract``."""
    real = {name: getattr(contract, name) for name in ("before_forward", "before_backward")}
    times: dict[str, list[int]] = {name: [] for name in real}
    spent: list[dict[str, float]] = []
    for functions in (real, dict.fromkeys(real, lambda *_: None)):
        for name, function in functions.items():
            setattr(contract, name, timed(function, times[name]))
        steps = []
        for _ in range(STEPS_CLOCKED):
            for each in times.values():
                each.clear()
            step()
            steps.append({name: sum(each) / 1000 for name, each in times.items()})
        spent.append({name: statistics.median(each[name] for each in steps) for name in real})
    for name, function in real.items():
        setattr(contract, name, function)
    return {name: spent[0][name] - spent[1][name] for name in real}


def timed(function: Callable[..., None], times: list[int]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        began = time.perf_counter_ns()
        function(*args)
        times.append(time.perf_counter_ns() - began)

    return call


class WithoutContract(ast.NodeTransformer):
    """Remove the fix from these functions. Its variables stay: new code of a function must have the old variables."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        if node.name in {name.rpartition(".")[2] for name in AT_A_REPLAY}:
            node.body = [self._never(each) if self._is_of_fix(each) else each for each in node.body]
        return node

    def _is_of_fix(self, statement: ast.stmt) -> bool:
        return any(isinstance(each, ast.Name) and each.id == "preconditions" for each in ast.walk(statement))

    def _never(self, statement: ast.stmt) -> ast.If:
        return ast.fix_missing_locations(ast.If(ast.Constant(False), [statement], []))


@functools.cache
def codes(with_fix: bool) -> dict[str, CodeType]:
    """Return the code of the functions that a replay runs, by name."""
    decision = decide(read(Source.installed()), Settings())
    _, text = patched(decision.source, decision.to_apply)[GRAPH]
    tree = ast.parse(text)
    compiled = compile(tree if with_fix else WithoutContract().visit(tree), "graph.py", "exec", dont_inherit=True)
    return {code.co_qualname: code for code in code_parts(compiled) if code.co_qualname in AT_A_REPLAY}


def compare(build: Callable[[], Step], microbatches: int, limit: float) -> str:
    """Return the times of steps with the fix and without it as text."""
    step = build()
    objects = [each for each in gc.get_objects() if type(each) is FunctionType]
    functions = [each for each in objects if each.__code__.co_qualname in AT_A_REPLAY]
    same = {name for name in AT_A_REPLAY if codes(True).get(name) == codes(False).get(name)}
    if same or {function.__code__.co_qualname for function in functions} != AT_A_REPLAY:
        raise SystemExit(f"{FIX} is not in {', '.join(sorted(same or AT_A_REPLAY))}, or no graphs were captured")

    def set_fix(there: bool) -> None:
        for function in functions:
            function.__code__ = codes(there)[function.__code__.co_qualname]

    gc.collect()
    gc.disable()
    rounds: list[dict[bool, tuple[float, float]]] = []
    end = time.monotonic() + limit
    while time.monotonic() < end or len(rounds) < 8:
        times = {}
        for there in (True, False) if len(rounds) % 2 else (False, True):
            set_fix(there)
            step()
            step()
            times[there] = seconds(step)
        rounds.append(times)
    set_fix(True)
    in_calls = clocked(step, sys.modules[MODULE].Preconditions)
    gc.enable()
    replays = 2 * LAYERS * microbatches
    added = median([1e6 * (each[True][0] - each[False][0]) / replays for each in rounds])
    ratio = median([each[True][1] / each[False][1] for each in rounds])
    step_ms = 1000 * statistics.median(each[False][1] for each in rounds)
    calls = " and ".join(f"{2 * each / replays:.2f} {name}" for name, each in in_calls.items())
    share = sum(in_calls.values()) / step_ms / 10
    return (
        f"step {step_ms:.2f} ms; in the fix's calls {share:.2f} % of it, microseconds {calls}; "
        f"{len(rounds)} rounds, microseconds a replay {added}, ratio {ratio}"
    )


def main(limit: float) -> None:
    warnings.simplefilter("ignore")
    print("TE", te_graph_fixes.report().te_version, torch.cuda.get_device_name())

    def show(what: str, microbatches: int, build: Callable[[], Step]) -> None:
        print(f"{what}, {microbatches} microbatches: {compare(build, microbatches, limit)}", flush=True)

    for name, size in {"512": TINY, "1024": SMALL}.items():
        show(f"hidden {name}, in an order", 4, lambda size=size: of_layers(True, 4, *size))
        show(f"hidden {name}, without one", 4, lambda size=size: of_layers(False, 4, *size))
    if importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core"):
        example = runpy.run_path(str(EXAMPLE))
        example["start"]()
        for name, changed in {"dense": DENSE, "MoE": {}}.items():
            for hidden, tokens in (TINY, SMALL):
                build = lambda h=hidden, t=tokens, c=changed: of_megatron(example, 8, h, t, **c)  # noqa: E731
                show(f"Megatron-Core, {name}, hidden {hidden}", 8, build)
    show("hidden 1024, in an order", 16, lambda: of_layers(True, 16, *SMALL))
    show("hidden 4096, 4096 tokens, in an order", 4, lambda: of_layers(True, 4, *LARGE))


if __name__ == "__main__":
    main(float(sys.argv[1]) if sys.argv[1:] else SECONDS)
