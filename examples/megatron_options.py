"""Test many options of Megatron-LM in three settings: graphs off, TransformerEngine's (TE's) graphs, te-graph-fixes.

    python examples/megatron_options.py ~/Megatron-LM                        # all options for two GPUs
    python examples/megatron_options.py ~/Megatron-LM --gpus 4               # also the options for four GPUs
    python examples/megatron_options.py ~/Megatron-LM multi-token router     # two options
    python examples/megatron_options.py --list                               # the names and flags of the options
    python examples/megatron_options.py --table JSON ...                     # the results of earlier runs as Markdown

For each option, runs train a small model on mock data in deterministic mode: one in each setting and, except with
Megatron's own graphs, one with the fixes under `te-graph-fixes run --check`. Up to `--at-once` runs share the GPUs. The
program compares the printed losses and norms with the values of the run with graphs off, digit by digit. If the program
is interrupted, it ends the runs in progress and prints the results of the finished options.

Exit with 1 if a run with te-graph-fixes fails or differs from graphs off, if a check does not pass (docs/check.md) or
changes the training, or after an interrupt. Exit with 2 for wrong usage. An option passes if its run with graphs off
fails.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_lm import GPT, GRAPHS, HYBRID, NEMOTRON, OVERLAP, PADDED, RECIPES, require, train
from megatron_runs import (
    CHECKED,
    FIXED,
    FOLDER,
    OFF,
    ORIGINAL,
    SETTINGS,
    Run,
    Training,
    count_differences,
    markdown,
    run_all,
    tensors_equal,
)

FIXED_CHECKED = next(checked for checked, unchecked in CHECKED.items() if unchecked == FIXED)
DENSE = """
    --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --ffn-hidden-size 1024
"""
MOE = f"""
    {DENSE} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none
"""
PARALLEL = "--expert-model-parallel-size 2"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
WIDE = "--expert-model-parallel-size 4"
CONTEXT = "--context-parallel-size 2"
FUSED = "--attention-backend fused"
PIPELINE = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
SHARDED = "--use-distributed-optimizer --ckpt-format fsdp_dtensor"
LATENT = """
    --multi-latent-attention --q-lora-rank 64 --kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 16
    --v-head-dim 32
"""
SHARED = "--moe-shared-expert-intermediate-size 512"
QUERIES = "--group-query-attention --num-query-groups 4"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
EVALUATE = "--eval-iters 2 --eval-interval 4"
SAVE = f"--save {FOLDER} --save-interval 4"
RESUME = f"{SAVE} --load {FOLDER}"
TWICE = ("--exit-interval 4", "")
"""The additional flags of the two stages of a run that ends after its fourth step and then continues."""
ROUTER = "moe_router moe_preprocess"
LAYERS = GRAPHS.removesuffix(" --cuda-graph-scope")
HISTORY = "--fp8-amax-history-len 1 --fp8-amax-compute-algo most_recent"
LOCAL = "--cuda-graph-impl local"


@dataclass(frozen=True)
class Option:
    """An option of Megatron-LM: its flags, and the small model that they are added to."""

    flags: str
    """The flags under test, which the table shows."""
    graphs: str = f"{GRAPHS} attn moe"
    recipe: str = "tensorwise"
    more: str = ""
    """Further flags that `flags` requires. The table does not show them."""
    model: str = f"{MOE} {PARALLEL} {PADDED}"
    programs: tuple[str, ...] = GPT
    stages: tuple[str, ...] = ("",)
    gpus: int = 2

    @property
    def ranks(self) -> str:
        """The text that follows the flags in tables: the number of ranks, or "" for two ranks."""
        return "" if self.gpus == Option.gpus else f", {self.gpus} ranks"

    def arguments(self, iterations: int) -> list[str]:
        """Return the flags of a run without graphs."""
        batch = f"--global-batch-size {2 * self.gpus}"
        flags = shlex.split(f"{self.model} {RECIPES[self.recipe]} {batch} {self.more} {self.flags}")
        return [*flags, "--train-iters", str(iterations)]


def dense(flags: str, modules: str = "attn mlp", **changed: Any) -> Option:
    return Option(flags, **{"graphs": f"{GRAPHS} {modules}", "model": DENSE, **changed})


def routed(flags: str, modules: str = f"attn {ROUTER}", **changed: Any) -> Option:
    """Return an option that captures ``modules``, by default attention and routers but no experts."""
    return Option(flags, f"{GRAPHS} {modules}", **{"model": f"{MOE} {PARALLEL}", **changed})


def hybrid(flags: str, modules: str, **changed: Any) -> Option:
    return Option(flags, f"{GRAPHS} {modules}", model=NEMOTRON, programs=HYBRID, **changed)


def four(flags: str, **changed: Any) -> Option:
    """Return an option for four GPUs that captures attention and experts."""
    return Option(flags, model=f"{MOE} {PADDED}", gpus=4, **changed)


OPTIONS = {
    # captured modules, as in the recipes of Megatron-Bridge and NeMo-RL
    "router": routed("--moe-permute-fusion"),
    "router-bf16": routed("--moe-permute-fusion", recipe="bf16"),
    "router-alone": routed("--moe-permute-fusion", ROUTER),
    "attention": routed("", "attn", recipe="delayed"),
    "experts": Option(PADDED),
    "experts-bf16": Option(PADDED, recipe="bf16"),
    "experts-delayed": Option(PADDED, recipe="delayed"),
    "experts-blockwise": Option(PADDED, recipe="blockwise"),
    "dense": dense("", recipe="delayed"),
    "dense-layers": dense("", graphs=LAYERS),
    "dense-mlp": dense("", "mlp", recipe="bf16"),
    "hybrid": hybrid(PADDED, "mamba attn moe"),
    "hybrid-bf16": hybrid(PADDED, "mamba attn moe", recipe="bf16"),
    "hybrid-router": hybrid("--moe-permute-fusion", f"mamba attn {ROUTER}"),
    "hybrid-attention": hybrid("", "mamba attn", recipe="delayed"),
    # parallelism
    "tensor-parallel": Option(TENSOR, model=f"{MOE} {PADDED}"),
    "tensor-parallel-dense": dense(TENSOR, recipe="delayed", more=EVALUATE),
    "distributed-optimizer": Option(ZERO),
    "distributed-optimizer-delayed": Option(ZERO, recipe="delayed"),
    "pipeline": dense(PIPELINE, recipe="delayed", more=EVALUATE),
    "pipeline-experts": Option(PIPELINE, model=f"{MOE} {PADDED}"),
    "overlap": routed(OVERLAP, "attn moe_router", recipe="bf16", more="--add-qkv-bias", model=MOE),
    "context-parallel": dense(CONTEXT, recipe="bf16", more=FUSED),
    "fsdp": dense(FSDP, recipe="bf16", more=f"{SHARDED} --no-gradient-accumulation-fusion"),
    # precision and optimizers
    "fp8-parameters": Option(f"--fp8-param-gather {ZERO}"),
    "fp8-parameters-delayed": Option("--fp8-param-gather --use-distributed-optimizer", recipe="delayed"),
    "first-last-bf16": Option("--first-last-layers-bf16"),
    "separate-wgrads": Option("--no-gradient-accumulation-fusion"),
    "bf16-gradients": Option("--grad-reduce-in-bf16"),
    "precision-aware": Option("--use-precision-aware-optimizer --use-distributed-optimizer", recipe="bf16"),
    "muon": routed("--optimizer muon", "attn moe_router"),
    # architecture
    "latent-attention": routed(LATENT, more=SHARED),
    "multi-token": Option("--mtp-num-layers 1"),
    "shared-expert": Option(SHARED),
    "shared-expert-overlap": routed(f"{SHARED} --moe-shared-expert-overlap"),
    "dense-and-moe": routed("--moe-layer-freq ([0,1]*2)", "attn mlp moe_router"),
    "grouped-query": Option(f"{QUERIES} --qk-layernorm --calculate-per-token-loss"),
    "sliding-window": routed("--window-size (127,0) --window-attn-skip-freq 2", more="--add-qkv-bias"),
    "learnable-softmax": routed("--softmax-type learnable"),
    "dropout": dense("--hidden-dropout 0.1 --attention-dropout 0.1", recipe="delayed"),
    # routers
    "router-fusion": routed("--moe-router-fusion --moe-router-dtype fp32"),
    "router-fp64": routed("--moe-router-dtype fp64", "attn moe_router"),
    "sigmoid-bias": routed("--moe-router-score-function sigmoid --moe-router-enable-expert-bias"),
    "auxiliary-loss": routed(
        "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3"
    ),
    "router-padding": routed("--moe-router-padding-for-quantization", "attn moe_router"),
    # memory
    "recompute-activations": routed(f"{SELECTIVE} layernorm moe_act"),
    "recompute-attention": dense(f"{SELECTIVE} core_attn", recipe="delayed"),
    "recompute-latent": routed(f"{SELECTIVE} mla_up_proj", more=LATENT),
    # evaluation, checkpoints, warmup and reruns
    "evaluation": Option(EVALUATE, recipe="delayed"),
    "save": Option(SAVE, recipe="delayed"),
    "resume": Option(RESUME, recipe="delayed", stages=TWICE),
    "resume-fp8-parameters": Option(RESUME, more=f"--fp8-param-gather {ZERO}", stages=TWICE),
    "warmup-0": Option("--cuda-graph-warmup-steps 0"),
    "rerun": Option("--rerun-mode validate_results"),
    # four GPUs
    "four-tensor-experts": four(f"{TENSOR} {PARALLEL}"),
    "four-data-experts": four(f"{PARALLEL} {ZERO}", recipe="delayed"),
    "four-pipeline-experts": four(f"{PIPELINE} {PARALLEL}"),
    "four-experts": four(WIDE, more="--num-experts 8"),
    "four-hybrid": hybrid(WIDE, "mamba attn moe", more=f"{PADDED} --num-experts 8", gpus=4),
    "four-tensor-pipeline": dense(f"{TENSOR} {PIPELINE}", recipe="delayed", gpus=4),
    "four-context-tensor": dense(f"{CONTEXT} {TENSOR}", recipe="bf16", more=FUSED, gpus=4),
    # Megatron's own graphs
    "local": dense("", graphs=LOCAL, recipe="delayed"),
    "local-history-1": dense(HISTORY, graphs=LOCAL, recipe="delayed"),
    "local-bf16": dense("", graphs=LOCAL, recipe="bf16"),
    "local-tensorwise": dense("", graphs=LOCAL),
    "full-iteration": dense("--no-check-for-nan-in-loss-and-grad", graphs=f"{LOCAL} --cuda-graph-scope full_iteration"),
}
"""The options by name."""


def main() -> int:
    options = parse()
    if options.list:
        print(*(f"{name}: {flags_of(name)}{option.ranks}" for name, option in OPTIONS.items()), sep="\n")
        return 0
    if options.table:
        print(table([json.loads(path.read_text()) for path in options.table]))
        return 0
    jobs: list[tuple[Training, str]] = []
    for name in options.names or [name for name, option in OPTIONS.items() if option.gpus <= options.gpus]:
        option, folder = OPTIONS[name], options.out.resolve() / name
        stages = tuple(tuple(stage.split()) for stage in option.stages)
        flags, graphs = option.arguments(options.iterations), shlex.split(option.graphs)
        training = train(name, options.checkout, option.programs, flags, graphs, folder, option.gpus, stages=stages)
        of_te = not option.graphs.startswith(LOCAL)
        settings = [*SETTINGS, *([FIXED_CHECKED] if of_te and not options.no_check else [])]
        jobs += [(training, setting) for setting in settings]
    found = run_all(jobs, options.at_once, options.timeout)
    runs: dict[str, dict[str, Any]] = {}
    for training, setting in jobs:
        if all((training.name, each) in found for other, each in jobs if other is training):
            runs.setdefault(training.name, {})[setting] = asdict(found[training.name, setting])
    (options.out / "options.json").write_text(json.dumps(runs))
    print(table([runs]))
    return int(len(found) < len(jobs) or not all(map(is_good, runs.values())))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", metavar="CHECKOUT", type=Path, nargs="?", help="a Megatron-LM, 0.16 or later")
    parser.add_argument("names", metavar="OPTION", nargs="*", help="default: all options for at most --gpus GPUs")
    parser.add_argument("--list", action="store_true", help="print the options, and exit")
    parser.add_argument(
        "--table", metavar="JSON", type=Path, nargs="+", help="print a table of earlier runs' results, and exit"
    )
    parser.add_argument("--no-check", action="store_true", help="omit the runs under --check")
    parser.add_argument("--gpus", type=int, default=Option.gpus, help="the number of GPUs; default: %(default)s")
    parser.add_argument(
        "--at-once", type=int, default=8, metavar="RUNS", help="simultaneous runs; default: %(default)s"
    )
    parser.add_argument("--iterations", type=int, default=8, help="steps of a run; default: %(default)s")
    parser.add_argument(
        "--out", type=Path, default=Path("megatron-options"), help="folder of logs; default: %(default)s"
    )
    parser.add_argument("--timeout", type=float, default=900, help="seconds per run; default: %(default)s")
    options = parser.parse_args()
    if options.list or options.table:
        return options
    if options.checkout is None:
        parser.error("the argument CHECKOUT is required")
    options.checkout = options.checkout.expanduser().resolve()
    if unknown := set(options.names) - OPTIONS.keys():
        parser.error(f"unknown options: {', '.join(sorted(unknown))}; --list prints the known options")
    require(parser, options.checkout, GPT)
    return options


def is_good(recorded: Mapping[str, Any]) -> bool:
    """Return True if nothing differs with te-graph-fixes and in the check, or if the option fails without graphs."""
    _, fixed, check = outcomes(recorded)
    return fixed in ("0", "-") and (check == "-" or check.endswith(" equal"))


def outcomes(recorded: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the results of an option as three table cells: TE's graphs, te-graph-fixes, and the check."""
    runs = {setting: Run(**run) for setting, run in recorded.items()}
    off = runs[OFF]
    if off.error or not off.figures:
        return f"without graphs: {shortened(off.error)}", "-", "-"
    graphs, fixed = (against(runs[setting], off) for setting in (ORIGINAL, FIXED))
    if FIXED_CHECKED not in runs:
        return graphs, fixed, "-"
    checked = runs[FIXED_CHECKED]
    if (changed := against(checked, off)) != fixed:
        return graphs, fixed, f"changes the training: {changed}"
    if equal := tensors_equal(checked):
        return graphs, fixed, f"{equal:,} equal"
    return graphs, fixed, " ".join(checked.check[-1:]) or "no result"


def against(run: Run, off: Run) -> str:
    """Return the number of losses and norms that differ from graphs off, or the error of the run, as a table cell."""
    if run.error:
        return f"raises {shortened(run.error)}"
    counts = count_differences(run, off).values()
    different = sum(count for count, _ in counts)
    return f"{different} of {sum(total for _, total in counts)}" if different else "0"


def shortened(error: str) -> str:
    return re.sub(r"^ended with status \d+: ", "", error).replace("|", "/")[:160]


def flags_of(name: str) -> str:
    return " ".join(OPTIONS[name].flags.split())


def table(recordings: list[dict[str, Any]]) -> str:
    """Return a Markdown table of all results, ordered by option and then by recording."""
    rows = [
        [
            "option",
            "flags",
            "graphs",
            "recipe",
            "TE, Megatron-LM",
            "TE's graphs",
            "with te-graph-fixes",
            "`run --check`",
        ]
    ]
    for name, option in OPTIONS.items():
        for recorded in recordings:
            if name in recorded:
                versions = recorded[name][OFF]["versions"]
                where = f"{versions.get('TE', '?')}, {versions.get('Megatron', '?')}"
                graphs = option.graphs.removeprefix(f"{GRAPHS} ").replace(LAYERS, "whole layers")
                flags = (f"`{flags_of(name)}`" if option.flags else "-") + option.ranks
                rows.append([name, flags, f"`{graphs}`", option.recipe, where, *outcomes(recorded[name])])
    return markdown(rows)


if __name__ == "__main__":
    sys.exit(main())
