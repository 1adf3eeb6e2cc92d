"""The memory and the time of captures, with this package and without it, on a GPU: tables, and the numbers as JSON.

    python tests/benchmarks/memory.py [--te NAME=FOLDER ...] [--json FILE] [--processes N] [--hidden N] [PROGRAM ...]

``FOLDER`` holds a TransformerEngine (TE); without ``--te`` it is the installed one. Each program runs in a process of
its own, several at a time; while one captures, the others wait. ``verify`` is a program for all those of `verify`, and
three more. MiB are those that a capture adds to what was allocated before: at its peak, after it, and after the
``reset()`` of all its graphs while the callables are still there. Exits with 1 where a peak is above 1.01 of TE's own.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SWITCH, LOCK = "TE_GRAPH_FIXES", "MEMORY_BENCHMARK_LOCK"
LIMIT = 1.01
TOKENS = 4096

PROGRAMS: dict[str, dict[str, Any]] = {
    "experts, bf16": {"layers": 3, "experts": 8},
    "experts, bf16, order, buffers reused": {"layers": 2, "experts": 4, "order": [1, 1, -1, -1]},
    "experts, FP8 cached, current": {"layers": 2, "experts": 4, "recipe": "current"},
    "experts, FP8 cached, delayed": {"layers": 2, "experts": 4, "recipe": "delayed"},
    "dense, bf16, interleaved order": {"layers": 4, "dense": True, "order": "interleaved"},
}
"""Experts are two `te.GroupedLinear`, 4096 x 14336; wgrads are fused. The interleaved order is that of stage 1 of 4."""

VERIFY = "verify"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {[*PROGRAMS, VERIFY]}")
    parser.add_argument("--te", action="append", metavar="NAME=FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--processes", type=int, default=5, metavar="N")
    parser.add_argument("--hidden", type=int, default=4096, help="of the experts; smaller for a try", metavar="N")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.programs, options.hidden)
    folders = dict(each.split("=", 1) for each in options.te or ["installed="])
    names = options.programs or [*PROGRAMS, VERIFY]
    names = [name for name in names if name != VERIFY] + [name for name in names if name == VERIFY]
    tasks = [(te, switch, name) for name in names for te in folders for switch in ("off", "on")]
    results: dict[tuple[str, str, str], dict[str, Any]] = {}
    above: list[str] = []
    with tempfile.NamedTemporaryFile() as lock, ThreadPoolExecutor(options.processes) as pool:
        run = functools.partial(measured, folders, lock.name, options.hidden)
        for task, numbers in zip(tasks, pool.map(lambda task: run(*task), tasks), strict=True):
            results[task] = numbers
            if options.json:
                options.json.write_text(json.dumps([[*task, numbers] for task, numbers in results.items()], indent=1))
            te, switch, name = task
            if switch == "on":
                above += (table_of_verify if name == VERIFY else table)(te, name, results)
                sys.stdout.flush()
    print("\n".join(["", f"above {LIMIT}:", *above] if above else ["", f"no peak is above {LIMIT}"]))
    return int(bool(above))


def measured(folders: dict[str, str], lock: str, hidden: int, te: str, switch: str, name: str) -> dict[str, Any]:
    """What children say of a program; after a capture of `verify` that failed another child goes on."""
    environ = {**os.environ, SWITCH: switch, LOCK: lock}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folders[te], str(ROOT), os.environ.get("PYTHONPATH")]))
    found: dict[str, Any] = {}
    while True:
        arguments = [sys.executable, __file__, "--child", "--hidden", str(hidden), name]
        done = subprocess.run(
            arguments,
            env=environ,
            input=json.dumps([*found]),
            capture_output=True,
            text=True,
        )
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        found |= {key: value for line in lines for key, value in line.items()}
        if done.returncode == 0:
            return found
        if not lines:
            return {**found, "failed": done.stderr.strip().splitlines()[-1:]}


def child(programs: list[str], hidden: int) -> int:
    """Measure a program in this process."""
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to stderr
    known = set(json.load(sys.stdin))
    import torch

    torch.ones(8, 8, device="cuda").mm(torch.ones(8, 8, device="cuda"))
    for name in programs:
        if name == VERIFY:
            return verify(known, results)
        for line in rounds(**PROGRAMS[name], hidden=hidden):
            print(json.dumps(line), file=results)
    return 0


def rounds(**program: Any) -> Iterator[dict[str, Any]]:
    """Three captures: the first of the process, another, and one while each ``main_grad`` holds numbers."""
    import torch

    import te_graph_fixes

    capture, weights = build(**program)
    yield {"te": te_graph_fixes.report().te_version, "gpu": torch.cuda.get_device_name()}
    for name in ("first", "again", "held"):
        for weight in weights:
            weight.main_grad.fill_(float(name == "held"))
        with captures_alone():
            before = settled()
            torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            graphs = capture()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        after = settled()
        kept = all(bool((weight.main_grad == float(name == "held")).all()) for weight in weights)
        for graph in graphs:
            graph.reset()
        reset = settled()
        graph = graphs = None
        gone = settled()
        numbers = {"peak": peak - before[0], "after": after[0] - before[0], "reserved": reserved - before[1]}
        numbers |= {"reset": reset[0] - before[0], "reset_reserved": reset[1] - before[1]}
        numbers |= {"gone": gone[0] - before[0], "gone_reserved": gone[1] - before[1]}
        yield {name: {**{key: round(n / 2**20, 1) for key, n in numbers.items()}, "ms": 1e3 * seconds, "kept": kept}}


def settled() -> tuple[int, int]:
    """The bytes that are allocated and reserved once nothing is there that nobody wants."""
    import torch

    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@contextlib.contextmanager
def captures_alone() -> Iterator[None]:
    """Wait until no other process captures."""
    with open(os.environ[LOCK], "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(
    layers: int,
    hidden: int,
    experts: int = 0,
    dense: bool = False,
    recipe: str = "bf16",
    order: list[int] | str | None = None,
) -> tuple[Callable[[], tuple[Any, ...]], list[Any]]:
    """What captures a program's layers, and their weights."""
    import torch
    import transformer_engine.pytorch as te

    from tests.support.megatron_orders import interleaved
    from tests.verify.driver.setting import make_recipe

    options: dict[str, Any] = {"fuse_wgrad_accumulation": True, "params_dtype": torch.bfloat16, "device": "cuda"}

    class Experts(torch.nn.Module):  # type: ignore[misc,unused-ignore]
        """The experts of a Mixtral layer, that share the tokens evenly."""

        is_first_microbatch = True

        def __init__(self) -> None:
            super().__init__()
            self.up = te.GroupedLinear(experts, hidden, hidden * 7 // 2, bias=False, **options)
            self.down = te.GroupedLinear(experts, hidden * 7 // 2, hidden, bias=False, **options)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            splits, first = [x.shape[0] // experts] * experts, self.is_first_microbatch
            out = self.down(self.up(x, splits, is_first_microbatch=first), splits, is_first_microbatch=first)
            self.is_first_microbatch = False
            return out  # type: ignore[no-any-return]

    size = hidden // 2 if dense else hidden
    modules = tuple(te.LayerNormMLP(size, 4 * size, **options) if dense else Experts() for _ in range(layers))
    weights = [parameter for module in modules for parameter in module.parameters() if parameter.dim() == 2]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        weight.grad_added_to_main_grad = False
    entries = interleaved(4, 1, layers, 16) if order == "interleaved" else order
    number = layers * (entries.count(1) if entries else 1)
    tokens = TOKENS // 2 if dense else TOKENS
    samples = [
        (torch.randn(tokens, size, dtype=torch.bfloat16, device="cuda").requires_grad_(),) for _ in range(number)
    ]
    quantized: dict[str, Any] = {}
    if recipe != "bf16":
        quantized = {"enabled": True, "recipe": make_recipe(recipe), "cache_quantized_params": True}
    in_order: dict[str, Any] = {}
    if entries:
        chunks = max(entries)
        in_order = {"_order": entries, "_num_layers_per_chunk": [layers // chunks] * chunks}
        in_order |= {"_reuse_graph_input_output_buffers": True, "sample_kwargs": [{}] * number}

    def capture() -> tuple[Any, ...]:
        given = list(samples) if entries else tuple(samples)
        return tuple(map(taken, te.make_graphed_callables(modules, given, **quantized, **in_order)))

    def taken(graph: Any) -> Any:
        """A graph; without an order it is taken from the module, which has its own forward again."""
        if not isinstance(graph, torch.nn.Module):
            return graph
        forward, reset = vars(graph).pop("forward"), vars(graph).pop("reset")
        for name in ("backward_dw", "__deepcopy__"):
            vars(graph).pop(name, None)
        forward.reset = reset
        return forward

    return capture, weights


def verify(known: set[str], results: Any) -> int:
    """The peaks of the captures of each program, in bytes; 1 after one that fails."""
    from tests.verify.driver.program import Skipped
    from tests.verify.memory import peaks

    for name, program in programs_of_verify().items():
        if name in known or program.ranks:
            continue
        try:
            print(json.dumps({name: peaks(program)}), file=results)
        except Skipped:
            print(json.dumps({name: None}), file=results)
        except Exception as error:
            print(json.dumps({name: f"{type(error).__name__}: {error}"[:200]}), file=results)
            return 1
    return 0


def programs_of_verify() -> dict[str, Any]:
    from tests.verify.cases import CASES, PIPELINED
    from tests.verify.driver.program import Program

    found: dict[str, dict[str, Any]] = {}
    for case in CASES.values():
        options = {name: value for name, value in case.options.items() if name not in ("breaks", "refusal")}
        if case.function == "programs:compare":
            found[case.name] = options
        elif case.function == "programs:compare_each":
            each = options.pop("programs")
            found |= {f"{case.name}, {name}": {**options, **own} for name, own in each.items()}
    pipelined = {"modules": ("linear",) * 3, "fused": True, "reuse": True}
    order = tuple(entry for entry in PIPELINED if entry % 1 == 0)
    found["benchmark, pipelined"] = {"order": order, **pipelined}
    found["benchmark, pipelined wgrads"] = {"order": PIPELINED, "delay": True, **pipelined}
    one = {"modules": ("grouped_linear",), "recipe": "delayed", "fused": True, "weights": "cached", "microbatches": 3}
    found["benchmark, one"] = one
    return {name: Program(**options) for name, options in found.items()}


def table(te: str, name: str, results: dict[Any, dict[str, Any]]) -> Iterator[str]:
    """Print a program's rows; the peaks that are too high."""
    without, with_fixes = (results[te, switch, name] for switch in ("off", "on"))
    if "again" not in without or "again" not in with_fixes:
        print(f"| {te} | {name} | failed: {without.get('failed')} {with_fixes.get('failed')} |")
        yield f"{te}, {name}: not measured"
        return
    if (te, name) == next((te, name) for te, _, name in results):
        print(f"{without['gpu']}. MiB without the package / with it; ms of the second capture")
        print("| TE | program | main_grad | peak | ratio | reserved | after | reset() | gone | ms | kept |")
        print("|---|---|---|---|---|---|---|---|---|---|---|")
    for each in ("first", "again", "held"):
        pairs = {key: (without[each][key], with_fixes[each][key]) for key in without[each]}
        cells = [f"{pairs[key][0]:,.0f} / {pairs[key][1]:,.0f}" for key in ("peak", "reserved", "after")]
        for key in ("reset", "gone"):
            allocated, reserved = pairs[key], pairs[f"{key}_reserved"]
            cells.append(" / ".join(f"{a:,.0f} ({r:,.0f})" for a, r in zip(allocated, reserved, strict=True)))
        cells += [
            f"{pairs['ms'][0]:.0f} / {pairs['ms'][1]:.0f}",
            " / ".join(["no", "yes"][n] for n in pairs["kept"]),
        ]
        ratio = pairs["peak"][1] / pairs["peak"][0]
        cells.insert(1, f"{ratio:.3f}")
        print(f"| {te} | {name} | {each} | {' | '.join(cells)} |")
        if ratio > LIMIT:
            yield f"{te}, {name}, {each}: {ratio:.3f}"


def table_of_verify(te: str, name: str, results: dict[Any, dict[str, Any]]) -> Iterator[str]:
    """Print how the peaks of all programs of `verify` compare; those that are too high."""
    without, with_fixes = (results[te, switch, name] for switch in ("off", "on"))
    pairs = {
        f"{program}, capture {n}": pair
        for program, found in with_fixes.items()
        if isinstance(found, list) and isinstance(without.get(program), list)
        for n, pair in enumerate(zip(without[program], found, strict=False))
    }
    ratios = {program: after / max(before, 1) for program, (before, after) in pairs.items()}
    failed = {program: found for program, found in with_fixes.items() if isinstance(found, str)}
    highest = max(ratios.values(), default=0.0)
    print(f"{te}, {name}: {len(ratios)} captures of {len(with_fixes)} programs; ratio at most {highest:.3f}")
    print("".join(f"  failed with the package: {program}: {said}\n" for program, said in failed.items()), end="")
    for program, ratio in sorted(ratios.items(), key=lambda item: -item[1]):
        if ratio > LIMIT:
            yield f"{te}, {program}: {pairs[program][0]:,} -> {pairs[program][1]:,} bytes, {ratio:.3f}"


if __name__ == "__main__":
    sys.exit(main())
