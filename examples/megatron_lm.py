"""Megatron-LM's own `pretrain_gpt.py`: graphs off, TransformerEngine's (TE's) graphs, and these with te-graph-fixes.

    python examples/megatron_lm.py ~/Megatron-LM                                  # FP8 experts on two GPUs
    python examples/megatron_lm.py ~/Megatron-LM --model overlap                  # expert-parallel overlap
    python examples/megatron_lm.py ~/Megatron-LM --gpus 8 -- --num-layers 16      # more flags of pretrain_gpt.py
    python examples/megatron_lm.py ~/Megatron-LM --model own -- FLAGS             # your own model
    python examples/megatron_lm.py --draw PNG TITLE=FOLDER ...                    # earlier runs in one picture

It prints loss and gradient norm of each iteration side by side, the time of a step and the peak memory, and draws
them (with matplotlib). All three train the same model on mock data in deterministic mode, so that runs that compute
the same print the same digits. Exit status: 0, with te-graph-fixes every printed figure is that of graphs off; 1, it is
not; 2, wrong use, or a run without graphs that failed.
"""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import importlib.util
import itertools
import json
import os
import re
import runpy
import shlex
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

OFF, ORIGINAL, FIXED = SETTINGS = ("graphs off", "TE's graphs", "with te-graph-fixes")
AS_RANK = "--as-a-rank"
DRAW = "--draw"
WARMUP = 3
"""Steps before the capture, Megatron's default."""
TIMED_OUT = 124

COMMON = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 8191 --eval-iters 0 --eval-interval 1000
    --log-interval 1 --log-params-norm --deterministic-mode --attention-backend unfused --te-rng-tracker
    --bf16 --transformer-impl transformer_engine --distributed-timeout-minutes 3
    --micro-batch-size 1 --lr 1e-3 --min-lr 1e-3 --lr-decay-style constant --attention-dropout 0 --hidden-dropout 0
"""
LAYERS = """
    --num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights
"""
EXPERTS = """
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1024 --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none
"""
PADDED = "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
FP8 = "--fp8-format hybrid --fp8-recipe tensorwise"
OVERLAP = "--expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm --delay-wgrad-compute"
GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-scope"


@dataclass(frozen=True)
class Model:
    """Flags of a model, and those that capture it."""

    flags: str
    graphs: str


MODELS = {
    "experts": Model(f"{LAYERS} {EXPERTS} {PADDED} {FP8}", f"{GRAPHS} attn moe"),
    "overlap": Model(f"{LAYERS} {EXPERTS} {OVERLAP} --add-qkv-bias", f"{GRAPHS} attn moe_router"),
    "dense": Model(f"{LAYERS} {FP8} --ffn-hidden-size 4096", f"{GRAPHS} attn mlp"),
    "own": Model("", f"{GRAPHS} attn"),
}


@dataclass
class Run:
    """What one run has printed: by quantity, the text of each iteration."""

    figures: dict[str, list[str]] = field(default_factory=dict)
    error: str = ""
    peak_mib: list[float] = field(default_factory=list)

    @classmethod
    def read(cls, log: str, status: int) -> Run:
        """The figures in a log of Megatron-LM."""
        run = cls()
        for line in log.splitlines():
            if re.search(r"\biteration\s+\d+/", line):
                for name, text in re.findall(r"\| *([a-zA-Z][^|:]*?) *: *([^| ]+) *(?=\|)", line):
                    run.figures.setdefault(name, []).append(text)
        run.peak_mib = [float(mib) for mib in re.findall(r"peak memory of rank \d+: (\S+) MiB", log)]
        if status == TIMED_OUT:
            run.error = "took longer than --timeout"
        elif status:
            errors = re.findall(r"^(?:\[rank\d+\]:? *)?((?:[\w.]*(?:Error|Exception)): .*)", log, re.MULTILINE)
            run.error = f"ended with status {status}: {errors[0] if errors else log[-200:].strip() or 'no output'}"
        return run

    def times(self) -> list[float]:
        """Milliseconds of the steps after the capture and the two that follow it."""
        return [float(text) for text in self.figures.get("elapsed time per iteration (ms)", [])][WARMUP + 2 :]


QUANTITIES = ("lm loss", "grad norm", "params norm")


def main() -> int:
    if sys.argv[1:2] == [AS_RANK]:
        be_rank(*sys.argv[2:])
        return 0
    if sys.argv[1:2] == [DRAW]:
        draw_recorded(*sys.argv[2:])
        return 0
    options = parse()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    runs: dict[str, Run] = {}
    for together in [SETTINGS] if options.at_once else [(setting,) for setting in SETTINGS]:
        processes = {setting: start(options, setting, out) for setting in together}
        deadline = time.monotonic() + options.timeout
        try:
            for setting, process in processes.items():
                runs[setting] = finish(process, setting, out, deadline)
        finally:
            for process in processes.values():
                end(process)
    (out / "runs.json").write_text(json.dumps({setting: asdict(run) for setting, run in runs.items()}, indent=1))
    print(table(runs))
    print(costs(runs, options.at_once))
    title = options.title or "pretrain_gpt.py of Megatron-LM"
    draw([(title, quantity, runs) for quantity in ("grad norm", "lm loss")], out / "megatron-lm.png")
    return conclude(runs, out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", metavar="CHECKOUT", type=Path, help="a checkout of Megatron-LM, 0.16 or later")
    parser.add_argument("--model", choices=MODELS, default="experts")
    parser.add_argument("--graphs", help="flags of the runs with graphs; default: those of the model")
    parser.add_argument("--gpus", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--iterations", type=int, default=14, help="default: %(default)s")
    parser.add_argument("--microbatches", type=int, default=4, help="a step, for each GPU; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("megatron-lm"), help="folder of logs; default: %(default)s")
    parser.add_argument("--title", default="", help="of the picture")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for a run; default: %(default)s")
    parser.add_argument("--at-once", action="store_true", help="all three at the same time: times then say nothing")
    parser.usage = "%(prog)s CHECKOUT [OPTIONS] [-- FLAGS of pretrain_gpt.py, for all runs]"
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:split])
    options.flags = sys.argv[split + 1 :]
    options.checkout = options.checkout.expanduser().resolve()
    if not (options.checkout / "pretrain_gpt.py").is_file():
        parser.error(f"give a checkout of Megatron-LM: there is no pretrain_gpt.py in {options.checkout}")
    if options.iterations <= WARMUP + 1:
        parser.error(f"--iterations {options.iterations}: graphs are captured after {WARMUP} steps, give {WARMUP + 2}")
    for needed in ("te_graph_fixes", "transformer_engine", "torch"):
        if importlib.util.find_spec(needed) is None:
            parser.error(f"install {needed.replace('_', '-')}: {sys.executable} does not have it")
    return options


def command(options: argparse.Namespace, setting: str) -> list[str]:
    """The command of a run."""
    model = MODELS[options.model]
    flags = [*shlex.split(COMMON), *shlex.split(model.flags), "--train-iters", str(options.iterations)]
    batch = options.gpus * options.microbatches
    flags += ["--global-batch-size", str(batch), *options.flags]
    if setting != OFF:
        flags += shlex.split(model.graphs if options.graphs is None else options.graphs)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.gpus)]
    rank = [__file__, AS_RANK, str(options.checkout / "pretrain_gpt.py"), *flags]
    runner = [sys.executable, "-m", "te_graph_fixes", "run", "--"] if setting == FIXED else []
    return [*runner, *torchrun, *rank]


def start(options: argparse.Namespace, setting: str, out: Path) -> subprocess.Popen[bytes]:
    print(f"{setting}: {shlex.join(command(options, setting))}", flush=True)
    settings = {"TE_GRAPH_FIXES": "on" if setting == FIXED else "off", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    defaults = {
        "NCCL_ALGO": "Ring",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32" if options.model == "overlap" else "1",
        "OMP_NUM_THREADS": "4",
    }
    with open(log_of(setting, out), "wb") as log:
        return subprocess.Popen(
            command(options, setting),
            cwd=options.checkout,
            env={**defaults, **os.environ, **settings},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def finish(process: subprocess.Popen[bytes], setting: str, out: Path, deadline: float) -> Run:
    """Wait for a run, and read what it has printed."""
    try:
        status = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        end(process)
        status = TIMED_OUT
    log = log_of(setting, out)
    run = Run.read(log.read_text(errors="replace"), status)
    if run.error:
        print(f"{setting}: {run.error} ({log})", file=sys.stderr)
    return run


def end(process: subprocess.Popen[bytes]) -> None:
    """End a run, if it has not ended: torchrun ends its ranks, which are not in its process group, in 30 seconds."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(45)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def log_of(setting: str, out: Path) -> Path:
    return out / f"{setting.replace(' ', '-').replace(chr(39), '')}.log"


def be_rank(program: str, *flags: str) -> None:
    """Run Megatron-LM's program in this process; print its peak memory at the end, and where it is if it is ended."""
    import torch

    faulthandler.register(signal.SIGTERM, chain=True)

    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        stand_in_for_apex()
    sys.path[:1] = [os.path.dirname(program)]
    sys.argv = [program, *flags]
    atexit.register(print_peak, torch, os.environ.get("RANK", "0"))
    runpy.run_path(program, run_name="__main__")


def print_peak(torch: ModuleType, rank: str) -> None:
    print(f"\npeak memory of rank {rank}: {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB", flush=True)


def stand_in_for_apex() -> None:
    """Megatron's embedding and output layers take fused weight gradients from an extension of apex."""
    import torch

    def accumulate(inputs: torch.Tensor, grads: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.add_(grads.flatten(0, -2).t() @ inputs.flatten(0, -2))

    module = ModuleType("fused_weight_gradient_mlp_cuda")
    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = accumulate  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module


def table(runs: dict[str, Run]) -> str:
    """Loss and gradient norm of each iteration as Markdown; what differs from graphs off is in bold."""
    names = [name for name in QUANTITIES[:2] if any(name in run.figures for run in runs.values())]
    head = ["iteration", *(f"{name}, {setting}" for name in names for setting in runs)]
    rows = [head, ["---"] * len(head)]
    for i in range(max(len(run.figures.get("lm loss", [])) for run in runs.values())):
        row = [str(i + 1)]
        for name in names:
            texts = [run.figures.get(name, [])[i : i + 1] for run in runs.values()]
            row += ["".join(text) if text == texts[0] else f"**{''.join(text) or 'ended'}**" for text in texts]
        rows.append(row)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def costs(runs: dict[str, Run], at_once: bool) -> str:
    lines = []
    for setting, run in runs.items():
        times = run.times()
        time = f"{statistics.median(times):.1f} ms a step (median of {len(times)})" if times and not at_once else ""
        memory = f"peak memory {max(run.peak_mib):.0f} MiB" if run.peak_mib else ""
        lines.append(f"{setting}: {', '.join(filter(None, [time, memory, run.error]))}")
    return "\n".join(lines)


def draw(panels: list[tuple[str, str, dict[str, Run]]], png: Path) -> None:
    """The picture, where matplotlib is there: a title, a quantity and the runs for each panel."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed (pip install matplotlib)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    looks: dict[str, dict[str, Any]] = {
        OFF: {"color": "0.65", "linewidth": 9, "solid_capstyle": "round"},
        ORIGINAL: {"color": "tab:red", "linewidth": 3, "marker": "o", "markersize": 8},
        FIXED: {"color": "black", "linewidth": 3, "linestyle": (0, (2, 1.5))},
    }
    pyplot.rcParams.update({"font.size": 15, "axes.spines.top": False, "axes.spines.right": False})
    figure, row = pyplot.subplots(1, len(panels), figsize=(13, 4.6), squeeze=False, constrained_layout=True)
    for axes, (title, quantity, runs) in zip(row[0], panels, strict=True):
        for setting, look in looks.items():
            values = [float(text) for text in runs[setting].figures.get(quantity, [])]
            replayed = range(WARMUP + 1, len(values) + 1)  # nothing is captured before, and all lines are one
            label = f"{setting} (ended with an error)" if runs[setting].error else setting
            axes.plot(replayed, values[WARMUP:], label=label, **look)
        axes.set(title=title, xlabel="step", ylabel={"grad norm": "gradient norm", "lm loss": "loss"}[quantity])
        axes.set_ylim(bottom=0 if quantity == "grad norm" else None)
        axes.xaxis.get_major_locator().set_params(integer=True)
    handles, labels = row[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(png, dpi=80)
    print(f"picture: {png}")


def draw_recorded(png: str, *sources: str) -> None:
    """One picture of the gradient norms of earlier runs: each source is TITLE=FOLDER, a folder that --out has named."""
    panels = []
    for source in sources:
        title, _, folder = source.rpartition("=")
        recorded = json.loads((Path(folder) / "runs.json").read_text())
        panels.append((title, "grad norm", {setting: Run(**run) for setting, run in recorded.items()}))
    draw(panels, Path(png))


def conclude(runs: dict[str, Run], out: Path) -> int:
    """Say whether the runs agree; the exit status."""
    reference = runs[OFF]
    if reference.error or not reference.figures.get("lm loss"):
        print(f"cannot compare: the run without graphs {reference.error or 'printed no loss'} (logs: {out})")
        return 2
    answers = {setting: runs[setting].error or differences(runs[setting], reference) for setting in (ORIGINAL, FIXED)}
    for setting, answer in answers.items():
        print(f"{setting} against graphs off: {answer or 'the same in every digit'}")
    return int(bool(answers[FIXED]))


def differences(run: Run, reference: Run) -> str:
    """By quantity, how many figures are not those of the reference; empty if all are."""
    parts = []
    for name in QUANTITIES:
        wanted = reference.figures.get(name, [])
        count = sum(a != b for a, b in itertools.zip_longest(wanted, run.figures.get(name, [])))
        if count:
            parts.append(f"{name} {count} of {len(wanted)}")
    return f"differ: {', '.join(parts)}" if parts else ""


if __name__ == "__main__":
    sys.exit(main())
