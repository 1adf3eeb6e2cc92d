"""Memory and copies of programs that TransformerEngine (TE) alone runs correctly, with this package and without.

    python tests/benchmarks/correct_programs.py [--te NAME=FOLDER ...] [--json FILE] [--limit SECONDS] [PROGRAM ...]

``FOLDER`` holds a TE; without ``--te`` it is the installed one. Each program runs in a process of its own, at most
``--limit`` seconds. MiB are those that a capture adds to the memory allocated before, at its peak and after it, without
workspaces. Samples that reused buffers replace are freed, so they may be negative. Torch's profiler counts the copies:
those that the host launches, and those of the GPU, which include copies inside graphs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SWITCH = "TE_GRAPH_FIXES"
Numbers = dict[str, float]


def delayed_wgrads(microbatches: int, size: int = 4096) -> Numbers:
    """Delayed wgrads without fusion, buffers reused, one microbatch in flight; a wgrad has 32 MiB."""
    import torch
    import transformer_engine.pytorch as te

    layer = linear(size, delay_wgrad_compute=True)
    samples = [(tensor(64, size),) for _ in range(microbatches)]
    with added_memory() as memory:
        graphs = te.make_graphed_callables(
            (layer,),
            samples,
            sample_kwargs=[{} for _ in samples],
            _order=[1, -1, -1.5] * microbatches,
            _num_layers_per_chunk=[1],
            allow_unused_input=True,
            _reuse_graph_input_output_buffers=True,
        )
        torch.cuda.synchronize()
    del graphs
    return memory


def saved_tensor_hooks() -> Numbers:
    """A backward of three layers, plain and inside saved-tensor hooks, as CPU offloading sets them."""
    import torch

    layers = graphed(3)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda packed: packed, lambda packed: packed)
    found = {}
    for name, context in (("plain", contextlib.nullcontext()), ("hooks", hooks)):
        with context:
            loss = run(layers, tensor(64, 64) * 1).sum()
        found |= {f"{name}: {key}": number for key, number in copies(loss.backward).items()}
    return found


def frozen_part() -> Numbers:
    """A step of four layers, of which the first is frozen and runs under `torch.no_grad`."""
    import torch

    layers = graphed(4, frozen=1)

    def step() -> None:
        with torch.no_grad():
            hidden = layers[0](tensor(64, 64, grad=False))
        run(layers[1:], hidden.requires_grad_() * 1).sum().backward()

    return copies(step)


def rotary_table(layers: int = 12, microbatches: int = 16, rows: int = 2**17) -> Numbers:
    """Megatron's rotary table: one tensor of 64 MiB without a gradient, a sample of every layer and microbatch.

    The order is Megatron's with delayed wgrads, for stage 0 of 4 with two model chunks. Copies are those of a forward.
    """
    import torch
    import transformer_engine.pytorch as te

    from tests.support.megatron_orders import interleaved, layer_wise

    class Rotated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear(128, delay_wgrad_compute=True, **fused())

        def forward(self, x: torch.Tensor, rotary_pos_emb: torch.Tensor) -> torch.Tensor:
            return self.linear(x * rotary_pos_emb[: x.shape[0]].to(x.dtype))  # type: ignore[no-any-return]

        def backward_dw(self) -> None:
            self.linear.backward_dw()

    modules = tuple(Rotated() for _ in range(layers))
    add_main_grads(modules)
    table = torch.randn(rows, 128, device="cuda")
    samples = [(tensor(64, 128),) for _ in range(layers * microbatches)]
    with added_memory() as memory:
        graphs = te.make_graphed_callables(
            modules,
            samples,
            sample_kwargs=[{"rotary_pos_emb": table} for _ in samples],
            _order=layer_wise(interleaved(4, 0, 2, microbatches), [layers // 2] * 2, wgrads=True),
            _num_layers_per_chunk=[1] * layers,
            allow_unused_input=True,
            _reuse_graph_input_output_buffers=True,
        )
        torch.cuda.synchronize()
    x = tensor(64, 128)
    return memory | copies(lambda: graphs[0](x, rotary_pos_emb=table))


def layers_as_chunks(layers: int = 48, microbatches: int = 4, size: int = 2048) -> Numbers:
    """Each of 48 layers a chunk, as Megatron's EP overlap passes them, on one stage; a grad input has 8 MiB."""
    import torch
    import transformer_engine.pytorch as te

    from tests.support.megatron_orders import interleaved, layer_wise

    modules = tuple(linear(size, **fused()) for _ in range(layers))
    add_main_grads(modules)
    samples = [(tensor(size, size),) for _ in range(layers * microbatches)]
    with added_memory() as memory:
        graphs = te.make_graphed_callables(
            modules,
            samples,
            sample_kwargs=[{} for _ in samples],
            _order=layer_wise(interleaved(1, 0, 1, microbatches), [layers]),
            _num_layers_per_chunk=[1] * layers,
            _reuse_graph_input_output_buffers=True,
        )
        torch.cuda.synchronize()
    del graphs
    return memory


PROGRAMS: dict[str, Callable[[], Numbers]] = {
    "delayed wgrads, 2 microbatches": lambda: delayed_wgrads(2),
    "delayed wgrads, 8 microbatches": lambda: delayed_wgrads(8),
    "saved-tensor hooks": saved_tensor_hooks,
    "frozen part": frozen_part,
    "rotary table": rotary_table,
    "layers as chunks": layers_as_chunks,
}


def tensor(rows: int, columns: int, grad: bool = True) -> Any:
    import torch

    return torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda").requires_grad_(grad)


def linear(size: int, **options: Any) -> Any:
    import torch
    import transformer_engine.pytorch as te

    return te.Linear(size, size, bias=False, params_dtype=torch.bfloat16, device="cuda", **options)


def fused() -> dict[str, Any]:
    return {"fuse_wgrad_accumulation": True}


def add_main_grads(modules: tuple[Any, ...]) -> None:
    import torch

    for module in modules:
        for weight in module.parameters():
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
            weight.grad_added_to_main_grad = False


def graphed(number: int, frozen: int = 0) -> tuple[Any, ...]:
    """Graphs of layers, the first ones frozen; each has run once."""
    import transformer_engine.pytorch as te

    layers = tuple(linear(64) for _ in range(number))
    for layer in layers[:frozen]:
        layer.requires_grad_(False)
    te.make_graphed_callables(layers, tuple((tensor(64, 64, grad=i >= frozen),) for i in range(number)))
    return layers


def run(layers: tuple[Any, ...], hidden: Any) -> Any:
    for layer in layers:
        hidden = layer(hidden)
    return hidden


@contextlib.contextmanager
def added_memory() -> Iterator[Numbers]:
    """The MiB that the body adds."""
    import torch

    found: Numbers = {}
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    yield found
    found["peak MiB"] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 2)
    gc.collect()
    found["MiB after it"] = round((torch.cuda.memory_allocated() - before) / 2**20, 2)


def copies(function: Callable[[], Any]) -> Numbers:
    import torch

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profile:
        function()
        torch.cuda.synchronize()
    on_gpu = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return {
        "copies of the host": sum(event.name == "aten::copy_" for event in profile.events()),
        "copies of the GPU": sum("DtoD" in name or "copy" in name.lower() for name in on_gpu),
        "kernels": len(on_gpu),
    }


def child(name: str) -> int:
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output goes to stderr
    import torch

    import te_graph_fixes

    linear(64)(tensor(64, 64)).sum().backward()  # allocates the workspaces of cuBLAS and TE
    about = {"gpu": torch.cuda.get_device_name(), "te": te_graph_fixes.report().te_version}
    print(json.dumps(about | PROGRAMS[name]()), file=results, flush=True)
    return 0


def measured(folder: str, switch: str, name: str, limit: float) -> dict[str, Any]:
    """The numbers of one program, or the reason for their absence."""
    paths = filter(None, [folder, str(ROOT), os.environ.get("PYTHONPATH")])
    environ = {**os.environ, SWITCH: switch, "PYTHONPATH": os.pathsep.join(paths)}
    arguments = [sys.executable, __file__, "--child", name]
    try:
        done = subprocess.run(arguments, env=environ, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"failed": f"no result in {limit:g} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1][:200]}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {[*PROGRAMS]}")
    parser.add_argument("--te", action="append", metavar="NAME=FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--limit", type=float, default=120, metavar="SECONDS")
    parser.add_argument("--processes", type=int, default=4, metavar="N")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.programs[0])
    folders = dict(each.split("=", 1) for each in options.te or ["installed="])
    tasks = [(name, te, switch) for name in options.programs or PROGRAMS for te in folders for switch in ("off", "on")]
    with ThreadPoolExecutor(options.processes) as pool:
        found = pool.map(lambda task: measured(folders[task[1]], task[2], task[0], options.limit), tasks)
        results = dict(zip(tasks, found, strict=True))
    if options.json:
        options.json.write_text(json.dumps([[*task, numbers] for task, numbers in results.items()], indent=1))
    print(next((numbers["gpu"] for numbers in results.values() if "gpu" in numbers), "no result"))
    print("| program | TE | number | TE alone | with the package |\n|---|---|---|---|---|")
    failed = False
    for name, te, _ in [task for task in tasks if task[2] == "off"]:
        without, with_fixes = results[name, te, "off"], results[name, te, "on"]
        for key in dict.fromkeys([*without, *with_fixes]):
            if key not in ("gpu", "te"):
                print(f"| {name} | {te} | {key} | {without.get(key, '')} | {with_fixes.get(key, '')} |")
        failed |= "failed" in without or "failed" in with_fixes
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
