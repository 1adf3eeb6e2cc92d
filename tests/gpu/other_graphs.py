"""Modules of TransformerEngine (TE) in graphs that TE's `make_graphed_callables` has not made, or not alone.

    python tests/gpu/other_graphs.py [PART OF A NAME ...]    # a line for each case whose name has one of the parts
    python tests/gpu/other_graphs.py --case NAME ...         # JSON lines, with the fixes that the environment asks for

A case trains a module and a projection behind it, eagerly and in graphs of its way, and compares outputs, dgrads,
wgrads, weights and the FP8 state of delayed scaling bit by bit. A line says how that came out without and with this
package, each in a process of its own, and whether the two differ in anything: the bits, exceptions, warnings,
attributes of modules and parameters, graph memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

STEPS, MICROBATCHES, LEARNING_RATE = 4, 3, 0.02
UNFUSED = {f"NVTE_{name}": "0" for name in ("FLASH_ATTN", "FUSED_ATTN", "MASKED_SOFTMAX_FUSION")}

Way = Callable[["Job"], None]
"""Runs a step of a job, in regions of which each becomes a graph."""

WAYS: dict[str, Way] = {}


def way(function: Way) -> Way:
    WAYS[function.__name__.replace("_", "-")] = function
    return function


class Job:
    """A model in training. Its first step is eager, in its second graphs are captured."""

    def __init__(self, case: str, graphed: bool) -> None:
        import torch

        self.way, self.module, self.recipe, *options = case.split("/")
        self.graphed, self.number = graphed, -1
        self.fused, self.delay = "fused" in options, "delay" in options
        self.recompute = "recompute" in options
        self.alone = "alone" in options
        self.graphs: dict[str, Any] = {}
        self.pool = torch.cuda.graph_pool_handle()
        torch.manual_seed(0)
        self.model = make_model(self.module, self.fused, self.delay and graphed, self.alone)
        self.parameters = list(self.model.parameters())
        self.besides: list[Any] = []
        self.call: Any = None
        self.slots = [Slot() for _ in range(MICROBATCHES)]

    def region(self, name: str, function: Callable[[], None]) -> None:
        import torch

        if not self.graphed or not self.number:
            function()
            return
        if name not in self.graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, stream=torch.cuda.current_stream()):
                function()
            self.graphs[name] = graph
        self.graphs[name].replay()

    def begin(self, keep_memory: bool = False) -> None:
        """No gradients, or zeros in the same memory."""
        for parameter in self.parameters:
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.zero_()
            elif keep_memory and parameter.grad is not None:
                parameter.grad.zero_()
            else:
                parameter.grad = None

    def autocast(self) -> Any:
        import transformer_engine.pytorch as te

        from te_graph_fixes.verify.driver.setting import make_recipe

        recipe = make_recipe(self.recipe.removeprefix("fp8-"))
        return te.autocast(enabled=True, recipe=recipe) if recipe else nullcontext()

    def forward(self, slot: Slot, first: bool | None) -> None:
        import transformer_engine.pytorch as te

        slot.x.grad = None
        with self.autocast():
            slot.out = te.checkpoint(self.model, slot.x, first) if self.recompute else self.model(slot.x, first)

    def backward(self, slot: Slot) -> None:
        slot.out.backward(slot.grad)
        slot.out = slot.out.detach()
        for parameter in self.parameters:
            if hasattr(parameter, "main_grad"):
                parameter.grad = None  # a dummy

    def wgrads(self) -> None:
        if self.delay and self.graphed:
            for module in self.model.modules():
                if hasattr(module, "backward_dw"):
                    module.backward_dw()

    def microbatch(self, slot: Slot, first: bool | None) -> None:
        self.forward(slot, first)
        self.backward(slot)
        self.wgrads()

    def update(self, parameters: list[Any]) -> None:
        import torch

        with torch.no_grad():
            for parameter in parameters:
                grad = getattr(parameter, "main_grad", parameter.grad)
                if grad is not None:
                    parameter.sub_((LEARNING_RATE * grad.sign()).to(parameter.dtype))

    def train(self) -> Iterator[dict[str, list[Any]]]:
        """What each step computes; inputs grow, so that scales have to follow."""
        import torch

        from te_graph_fixes.verify.driver.training import fp8_state

        for self.number in range(STEPS):
            for slot in self.slots:
                slot.load(self.number)
            self.found: dict[str, list[Any]] = {"outputs": [], "dgrads": []}
            WAYS[self.way](self)
            torch.cuda.synchronize()
            others = [parameter for module in self.besides for parameter in module.parameters()]
            every = self.parameters + others
            grads = [getattr(parameter, "main_grad", parameter.grad) for parameter in every]
            self.found["wgrads"] = [each.detach().float().clone() for each in grads if each is not None]
            self.update(others if self.way in UPDATING else every)
            for parameter in others:
                parameter.grad = None
            self.found["weights"] = [parameter.detach().clone() for parameter in every]
            self.found["FP8 state"] = [each.clone() for each in fp8_state(self.model)]
            yield self.found

    def keep(self, slot: Slot) -> None:
        self.found["outputs"].append(slot.out.detach().clone())
        if slot.x.grad is not None:
            self.found["dgrads"].append(slot.x.grad.clone())


class Slot:
    """The memory of one microbatch's input, output and output grad."""

    def __init__(self) -> None:
        from te_graph_fixes.verify.driver.setting import random

        self.x, self.grad = random().requires_grad_(), random()
        self.out: Any = None

    def load(self, step: int) -> None:
        import torch

        from te_graph_fixes.verify.driver.setting import random

        with torch.no_grad():
            self.x.copy_(random() * 3**step)
            self.grad.copy_(random() * 3**step)


def make_model(module: str, fused: bool, delay: bool, alone: bool) -> Any:
    """The module, whatever its forward takes, and a projection, unless it is to be alone."""
    import torch
    import transformer_engine.pytorch as te

    from te_graph_fixes.verify.driver.setting import HIDDEN, TOKENS

    options: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cuda", "fuse_wgrad_accumulation": fused}
    made: Any
    if module == "operations":
        made = te.ops.Sequential(te.ops.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.bfloat16, device="cuda"))
    elif module == "TransformerLayer":
        made = te.TransformerLayer(
            HIDDEN, 2 * HIDDEN, 4, attention_dropout=0.0, hidden_dropout=0.0, fuse_qkv_params=True, **options
        )
    else:
        sizes = {"LayerNormMLP": (HIDDEN, 2 * HIDDEN), "GroupedLinear": (2, HIDDEN, HIDDEN)}
        made = getattr(te, module)(*sizes.get(module, (HIDDEN, HIDDEN)), delay_wgrad_compute=delay, **options)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = made
            self.last = (
                torch.nn.Identity() if alone else te.Linear(HIDDEN, HIDDEN, delay_wgrad_compute=delay, **options)
            )

        def forward(self, x: torch.Tensor, first: bool | None) -> Any:
            if module == "operations":
                x = self.first(x)
            elif module == "GroupedLinear":
                x = self.first(x, [TOKENS // 2] * 2, is_first_microbatch=first)
            elif module == "TransformerLayer":
                x = self.first(x.unsqueeze(1), is_first_microbatch=first).squeeze(1)
            else:
                x = self.first(x, is_first_microbatch=first)
            return x if alone else self.last(x, is_first_microbatch=first)

    model = Model()
    for parameter in model.parameters():
        if fused and parameter.dim() == 2:
            parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32, device="cuda")
            parameter.grad_added_to_main_grad = False
    return model


@way
def step(job: Job) -> None:
    """A graph of all microbatches."""

    def run() -> None:
        job.begin()
        for number, slot in enumerate(job.slots):
            job.microbatch(slot, number == 0)

    job.region("step", run)
    for slot in job.slots:
        job.keep(slot)


@way
def step_and_update(job: Job) -> None:
    """A graph of all microbatches and the optimizer's update; none is told to be the first."""

    def run() -> None:
        job.begin()
        for slot in job.slots:
            job.microbatch(slot, None)
        job.update(job.parameters)

    job.region("step", run)
    for slot in job.slots:
        job.keep(slot)


UPDATING = {"step-and-update"}


@way
def microbatches(job: Job) -> None:
    """A graph of the first microbatch and one of later ones, in a pool."""

    def first() -> None:
        job.begin(keep_memory=True)
        job.microbatch(job.slots[0], True)

    job.region("first", first)
    job.keep(job.slots[0])
    for _ in range(2):
        job.region("later", lambda: job.microbatch(job.slots[1], False))
        job.keep(job.slots[1])


@way
def autocast_around(job: Job) -> None:
    """As `microbatches`; an autocast around all of it, besides."""
    with job.autocast():
        microbatches(job)


@way
def forward_and_backward(job: Job) -> None:
    """A graph of a forward, one of the backward and one of the wgrads, where they are delayed, in a pool."""
    job.begin(keep_memory=True)
    for number, slot in enumerate(job.slots):
        for name, run in (
            ("forward", lambda slot=slot, first=not number: job.forward(slot, first)),
            ("backward", lambda slot=slot: job.backward(slot)),
            ("wgrads", job.wgrads),
        ):
            if name != "wgrads" or job.delay:
                job.region(f"{name} {number}", run)
        job.keep(slot)


@way
def inference(job: Job) -> None:
    """A graph of a forward without gradients; the weights are trained eagerly."""
    import torch

    job.begin()
    job.microbatch(job.slots[0], None)

    def run() -> None:
        with torch.no_grad():
            job.forward(job.slots[1], None)

    job.region("inference", run)
    job.found["outputs"].append(job.slots[1].out.clone())


@way
def torch_callables(job: Job) -> None:
    """PyTorch's own `make_graphed_callables`."""
    import torch

    class InAutocast(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def forward(self, x: torch.Tensor) -> Any:
            with job.autocast():
                return self.model(x, None)

    if job.graphed and job.number == 1:
        job.call = torch.cuda.make_graphed_callables(InAutocast(), (torch.zeros_like(job.slots[0].x).requires_grad_(),))
    call = job.call or InAutocast()
    job.begin(keep_memory=True)
    for slot in job.slots:
        slot.x.grad = None
        slot.out = call(slot.x).clone()
        job.backward(slot)
        job.keep(slot)


def beside_te(job: Job, first: bool, number: int = 0) -> None:
    """Run a projection through TE's own graph, which caches its weights and sets the skip flag."""
    import torch
    import transformer_engine.pytorch as te

    from te_graph_fixes.verify.driver.setting import HIDDEN, make_recipe, random

    if len(job.besides) == number:
        recipe, rng = make_recipe(job.recipe.removeprefix("fp8-")), torch.cuda.get_rng_state()
        job.besides.append(te.Linear(HIDDEN, HIDDEN, bias=False, params_dtype=torch.bfloat16, device="cuda"))
        if job.graphed:
            options = {"enabled": recipe is not None, "recipe": recipe, "cache_quantized_params": recipe is not None}
            te.make_graphed_callables(job.besides[number], (random().requires_grad_(),), **options)
        torch.cuda.set_rng_state(rng)
    x = random().requires_grad_()
    with job.autocast():
        out = job.besides[number](x, is_first_microbatch=first)
    out.backward(out.detach())
    job.found["outputs"].append(out.detach().clone())
    job.found["dgrads"].append(x.grad.clone())


@way
def before_te(job: Job) -> None:
    """As `step`; TE's graph of another module is captured and replayed after it."""
    step(job)
    if job.number:
        beside_te(job, True)
        beside_te(job, False)


@way
def after_te(job: Job) -> None:
    """As `step`; TE's graph of another module was captured before, and is replayed before it."""
    beside_te(job, True)
    beside_te(job, False)
    step(job)


@way
def after_te_was_reset(job: Job) -> None:
    """As `step`, captured after TE's graph of another module and ``FP8GlobalStateManager.reset()``."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    if not job.number:
        beside_te(job, True)
        beside_te(job, False)
        FP8GlobalStateManager.reset()
    step(job)


@way
def te_after_te_was_reset(job: Job) -> None:
    """Two graphs of TE's, the second captured after ``FP8GlobalStateManager.reset()``."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    job.begin()
    job.microbatch(job.slots[0], None)
    for first in (True, False):
        for number in range(2):
            if not job.number and first and number:
                FP8GlobalStateManager.reset()
            beside_te(job, first, number)


@way
def around_te(job: Job) -> None:
    """A graph around a replay of TE's graph."""
    job.begin()
    job.microbatch(job.slots[0], None)
    if not job.number:
        beside_te(job, True)
    job.region("around", lambda: beside_te(job, False))


@way
def compiled(job: Job) -> None:
    """``torch.compile(mode="reduce-overhead")``."""
    import torch

    if job.graphed and job.call is None:
        job.call = torch.compile(lambda x: torch.tanh(job.model(torch.sin(x), None)), mode="reduce-overhead")
    call = job.call or (lambda x: torch.tanh(job.model(torch.sin(x), None)))
    job.begin()
    for slot in job.slots:
        slot.x.grad = None
        torch.compiler.cudagraph_mark_step_begin()
        with job.autocast():
            slot.out = call(slot.x).clone()
        job.backward(slot)
        job.keep(slot)


LAYERS = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "TransformerLayer", "operations")
SINGLE = LAYERS[:4]
RECIPES = ("bf16", "fp8-delayed", "fp8-current", "fp8-block")
CASES = [
    *map("/".join, product(["step"], LAYERS, RECIPES)),
    *map("/".join, product(["step-and-update", "microbatches"], ["LayerNormMLP", "GroupedLinear"], RECIPES[:3])),
    *map("/".join, product(["step", "microbatches"], SINGLE, RECIPES[:3], ["fused"])),
    *map("/".join, product(["microbatches"], SINGLE, RECIPES[:3], ["delay", "delay/fused"])),
    *map("/".join, product(["forward-and-backward"], SINGLE, RECIPES[:3], ["fused", "delay/fused"])),
    *map("/".join, product(["step", "microbatches"], ["Linear", "LayerNormMLP"], RECIPES[1:3], ["recompute"])),
    *map("/".join, product(["inference", "autocast-around"], ["LayerNormMLP", "GroupedLinear"], RECIPES[1:3])),
    *map("/".join, product(["torch-callables"], ["LayerNormMLP", "GroupedLinear"], ["bf16", "fp8-current"])),
    *map("/".join, product(["before-te", "after-te", "after-te-was-reset"], ["Linear", "GroupedLinear"], RECIPES[:3])),
    *map("/".join, product(["after-te"], ["GroupedLinear"], RECIPES[1:3], ["alone"])),
    *map("/".join, product(["te-after-te-was-reset", "around-te", "compiled"], ["Linear"], RECIPES[:3])),
]


def measure(case: str) -> dict[str, Any]:
    """Train eagerly and in graphs; the largest error of each kind, and what may differ without this package."""
    import torch
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    from te_graph_fixes.verify.driver.comparison import error

    torch.cuda.set_stream(torch.cuda.Stream())
    runs, jobs, bits = [], [], hashlib.sha256()
    for graphed in (False, True):
        FP8GlobalStateManager.reset()
        jobs.append(Job(case, graphed))
        runs.append(list(jobs[-1].train()))
    errors: dict[str, float] = {}
    for eager, found in zip(*runs, strict=True):
        for kind, tensors in found.items():
            errors[kind] = max(errors.get(kind, 0.0), error(tensors, eager[kind]))
            for tensor in tensors:
                bits.update(tensor.detach().float().cpu().numpy().tobytes())
    owners = [*jobs[1].model.modules(), *jobs[1].parameters]
    return {
        "errors": errors,
        "bits": bits.hexdigest()[:12],
        "attributes": sorted({name for owner in owners for name in vars(owner)}),
        "memory": torch.cuda.memory_allocated() >> 10,
    }


def one(case: str) -> dict[str, Any]:
    """What `measure` finds, or the exception."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            found = measure(case)
        except Exception as failure:
            found = {"failed": f"{type(failure).__name__}: {' '.join(str(failure).split())[:160]}"}
    texts = {str(each.message).split("\n")[0][:100] for each in warned if "te_graph_fixes" not in str(each.message)}
    return {**found, "warnings": sorted(texts)}


def in_child(program: str, case: str, setting: str) -> dict[str, Any]:
    """The last line of ``program --case``, in a process with the package or without."""
    environment = {**os.environ, **UNFUSED, "TE_GRAPH_FIXES": setting, "TE_GRAPH_FIXES_VERBOSE": "0"}
    done = subprocess.run(
        [sys.executable, program, "--case", case], env=environment, capture_output=True, text=True, check=False
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    except (IndexError, ValueError):
        return {"failed": f"exit status {done.returncode}: {done.stderr[-200:]}"}


def outcome(found: dict[str, Any]) -> str:
    if "failed" in found:
        return str(found["failed"])
    wrong = [f"{kind} {value:.3g}" for kind, value in found["errors"].items() if value]
    return "off by: " + ", ".join(wrong) if wrong else "equal"


def line(program: str, case: str) -> str:
    """How a case comes out without and with this package, and in what the two differ."""
    without, fixed = (in_child(program, case, setting) for setting in ("off", "on"))
    keys = sorted((without.keys() | fixed.keys()) - {"errors", "failed"})
    different = [f"{key} {without.get(key)} -> {fixed.get(key)}" for key in keys if without.get(key) != fixed.get(key)]
    return f"{case}: {outcome(without)} | {outcome(fixed)} | {'; '.join(different) or 'alike'}"


def run(program: str, cases: list[str]) -> None:
    """Print the line of each case that the command line asks for."""
    if sys.argv[1:2] == ["--case"]:
        import te_graph_fixes

        for case in sys.argv[2:]:
            print(json.dumps({"te": te_graph_fixes.report().te_version, **one(case)}), flush=True)
        return
    chosen = [case for case in cases if not sys.argv[1:] or any(part in case for part in sys.argv[1:])]
    with ThreadPoolExecutor(int(os.environ.get("PROCESSES", "6"))) as pool:
        for text in pool.map(lambda case: line(program, case), chosen):
            print(text, flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    run(__file__, CASES)
