"""Log all calls to torch and to TransformerEngine's (TE) extension in eager training of the modules that fixes edit.

``python -m tests.simulator -m tests.support.eager_training FUNCTIONS [PART]`` prints a line of JSON for each program:
its options, and digests of its operations and its results. ``FUNCTIONS`` is a JSON list of pairs of module and name.
The last line lists the ``FUNCTIONS`` that ran. PART, such as ``2/7``, selects every seventh program from the second on.
``FULL_LOG=1`` prints every operation, and the name and digest of every result, instead of the two digests.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformer_engine_torch as extension
from torch.utils._python_dispatch import TorchDispatchMode

H = 128
"""The rows and columns of an input. TE swizzles the scales of NVFP4 weights only for multiples of 128."""
PLAIN = {"dtype": torch.bfloat16, "device": "cuda"}
log: list[str] = []


def described(value: Any) -> str:
    """Return the shape and dtype of a tensor, the values of a container or number, or the name of another type."""
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__}{tuple(value.shape)}{value.dtype}"
    if isinstance(value, (list, tuple)):
        return f"({','.join(map(described, value))})"
    if isinstance(value, dict):
        return f"({','.join(f'{name}={described(each)}' for name, each in value.items())})"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


class Operations(TorchDispatchMode):
    """A dispatch mode that adds the operations of torch to the log."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        log.append(f"{function} {described(args)} {described(kwargs or {})}")
        return function(*args, **kwargs or {})


def logged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        log.append(f"tex.{name} {described(args)} {described(kwargs)}")
        return function(*args, **kwargs)

    return call


for name, function in list(vars(extension).items()):
    if callable(function) and not isinstance(function, type):
        setattr(extension, name, logged(name, function))

import transformer_engine.pytorch as te  # noqa: E402
from transformer_engine.common import recipe as recipes  # noqa: E402
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker  # noqa: E402
from transformer_engine.pytorch.module.grouped_linear import _GroupedLinear  # noqa: E402
from transformer_engine.pytorch.quantization import FP8GlobalStateManager  # noqa: E402

from te_graph_fixes.patching.installation import loaded_function  # noqa: E402

RECIPES = {
    "bf16": lambda: None,
    "delayed": lambda: recipes.DelayedScaling(amax_history_len=3),
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
}
OF_GPU = {
    "hopper": ("bf16", "delayed", "current", "block"),
    "blackwell": ("delayed", "current", "block", "mxfp8", "nvfp4"),
    "blackwell-rtx": ("delayed", "current", "nvfp4"),
}
MARKS: dict[str, tuple[bool | None, ...]] = {
    "none": (None, None),
    "marks": (True, False),
    "false": (True, False, False),
}


ON_GPU = {"use_grouped_tensor": True} if "use_grouped_tensor" in inspect.signature(te.GroupedLinear).parameters else {}
"""The option for experts with splits on the GPU. TE before 2.19 reads an environment variable, which `train` sets."""


class Model(torch.nn.Module):
    """A model of four modules and, except in block scaling, a `te.ops` operation.

    If ``on_gpu``, the experts' splits are on the GPU.
    """

    def __init__(self, recipe: str, fused: bool, delay: bool, on_gpu: bool) -> None:
        super().__init__()
        options = {"params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": fused, "delay_wgrad_compute": delay}
        self.delay = delay
        self.dense = torch.nn.ModuleList(
            [te.Linear(H, H, **options), te.LayerNormLinear(H, H, **options), te.LayerNormMLP(H, H, **options)]
        )
        self.splits: Any = [H // 4, H * 3 // 4]
        if on_gpu:
            options |= {"bias": False, **ON_GPU}
            self.splits = torch.tensor(self.splits, device="cuda")
        self.experts = te.GroupedLinear(2, H, H, **options)
        operation = te.ops.Linear(H, H, dtype=torch.bfloat16, accumulate_into_main_grad=fused)
        # `te.ops` supports block scaling only from TE 2.18 on.
        self.operation = torch.nn.Identity() if recipe == "block" else te.ops.Sequential(operation)
        for parameter in self.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)

    def forward(self, x: torch.Tensor, first: bool | None, recompute: bool) -> torch.Tensor:
        marks = {"is_first_microbatch": first}
        for module in self.dense:
            x = te.checkpoint(module, x, **marks) if recompute else module(x, **marks)
        return self.operation(self.experts(x, self.splits, **marks))

    def backward_dw(self) -> None:
        for module in (*self.dense, self.experts):
            module.backward_dw()


def state(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield names and values of parameters, gradients, FP8 states and cached weights."""
    for name, parameter in module.named_parameters():
        yield from ((name, parameter), (f"{name}.grad", parameter.grad), (f"{name}.main_grad", parameter.main_grad))
        yield f"{name} added", getattr(parameter, "grad_added_to_main_grad", None)
    for name, part in module.named_modules():
        for direction in ("scaling_fwd", "scaling_bwd"):
            found = getattr(part, "fp8_meta", {}).get(direction)
            yield f"{name}.scale", getattr(found, "scale", None)
            yield f"{name}.amax_history", getattr(found, "amax_history", None)
        for weight, cached in getattr(part, "_fp8_workspaces", {}).items():
            for field, value in sorted(vars(cached).items()):
                yield f"{name}.{weight}.{field}", value if isinstance(value, torch.Tensor) else described(value)


def values(name: str, value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{name} {value}"
    content = value.detach().contiguous().view(torch.uint8).numpy().tobytes() if value.dim() else repr(value)
    return f"{name} {hashlib.sha1(content if isinstance(content, bytes) else content.encode()).hexdigest()}"


def train(recipe: str, fused: bool, delay: bool, marks: str, on_gpu: bool) -> list[str]:
    """Run three steps and two evaluations between them. Return names and digests of results.

    The second step recomputes the forward unless wgrads are delayed.
    """
    results: list[str] = []
    os.environ["NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM"] = str(int(on_gpu))
    torch.manual_seed(1)
    FP8GlobalStateManager.reset()
    model = Model(recipe, fused, delay, on_gpu)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def evaluate(name: str, first: bool | None) -> None:
        with torch.no_grad(), te.autocast(enabled=name != "bf16", recipe=RECIPES[name]()):
            results.append(values("evaluation", model(torch.randn(H, H, **PLAIN), first, False)))

    def step(recompute: bool) -> None:
        for first in MARKS[marks]:
            x = torch.randn(H, H, **PLAIN, requires_grad=True)
            with te.autocast(enabled=recipe != "bf16", recipe=RECIPES[recipe]()):
                out = model(x, first, recompute)
            out.float().pow(2).mean().backward()
            if delay:
                model.backward_dw()
            results.extend([values("output", out), values("dgrad", x.grad)])
        results.extend(values(name, value) for name, value in state(model))
        optimizer.step()
        optimizer.zero_grad()

    step(recompute=False)
    evaluate(recipe, None if marks == "none" else False)
    step(recompute=not delay)
    evaluate("bf16", None)
    step(recompute=False)
    return results


def accessors() -> None:
    """Call the accessors of the skip flag, which TE 2.15 and 2.16 lack."""
    if hasattr(FP8GlobalStateManager, "set_skip_fp8_weight_update_tensor"):
        FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(True)
        flag = FP8GlobalStateManager.get_skip_fp8_weight_update_tensor()
        assert flag is not None
        assert flag.item() == 1.0
        FP8GlobalStateManager.reset()


def track_random_states() -> None:
    """Use an RNG tracker, whose methods run outside of steps."""
    tracker = CudaRNGStatesTracker()
    tracker.add("states", 1)
    tracker.set_states(tracker.get_states())


def digest(lines: list[str]) -> Any:
    return lines if os.environ.get("FULL_LOG") else [len(lines), hashlib.sha1("\n".join(lines).encode()).hexdigest()]


def main(functions: str, part: str = "1/1") -> None:
    wanted = {}
    for module, name in json.loads(functions):
        function = loaded_function(module, name, ())
        wanted[getattr(function, "__func__", function).__code__] = f"{module}.{name}"
    ran = set()

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in wanted:
            ran.add(wanted[frame.f_code])

    gpu = os.environ.get("TE_SIMULATOR_GPU", "hopper")
    options = (True, False), (False, True), MARKS
    programs = [*itertools.product(OF_GPU[gpu], *options, (False,))]
    if gpu == "blackwell" and hasattr(_GroupedLinear, "_make_grouped_tensor"):
        programs += itertools.product(("mxfp8",), *options, (True,))
    first, interval = map(int, part.split("/"))
    for program in programs[first - 1 :: interval]:
        log.clear()
        sys.setprofile(profile if wanted else None)
        with Operations():
            results = train(*program)
        sys.setprofile(None)
        print(json.dumps([program, digest(log), digest(results)]), flush=True)
    sys.setprofile(profile)
    accessors()
    track_random_states()
    sys.setprofile(None)
    print(json.dumps(sorted(ran)))


if __name__ == "__main__":
    main(*sys.argv[1:])
