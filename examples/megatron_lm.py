"""Train with Megatron-LM in three settings: graphs off, TransformerEngine's (TE's) graphs, and te-graph-fixes.

    python examples/megatron_lm.py ~/Megatron-LM                                  # FP8 experts on two GPUs
    python examples/megatron_lm.py ~/Megatron-LM --model hybrid                   # Mamba, attention and experts
    python examples/megatron_lm.py ~/Megatron-LM --model overlap                  # expert-parallel overlap
    python examples/megatron_lm.py ~/Megatron-LM --gpus 8 -- --num-layers 16      # more flags of pretrain_gpt.py
    python examples/megatron_lm.py ~/Megatron-LM --model own -- FLAGS             # your own model
    python examples/megatron_lm.py --draw PNG TITLE=FOLDER ...                    # earlier runs in one picture

The program prints the losses and gradient norms of the three runs side by side, the norms of `main_grad` by kind of
parameter, the time of a step and the peak memory. It also draws a picture, if matplotlib is installed. All runs train
the same model on mock data in deterministic mode, so correct runs print the same digits. With --check, two more runs
compare graphs with eager modules during the training. `hybrid` needs mamba-ssm.

Exit with 1 if the run with the fixes fails or differs from graphs off, if a run with --check fails or changes a digit,
if the check with the fixes does not pass (docs/check.md), or after an interrupt. Exit with 2 for wrong usage, or if the
run with graphs off fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron_rank import prepare, watch
from megatron_runs import WARMUP, Training, add_arguments, by_kind, draw, is_hybrid, load, over_steps, run_and_report

AS_RANK = "--as-a-rank"
DRAW = "--draw"
GPT = ("pretrain_gpt.py",)
HYBRID = ("pretrain_hybrid.py", "pretrain_mamba.py")
"""Megatron-LM's program for hybrid models: its name in Megatron-LM 0.19, and its name in earlier releases."""

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
NEMOTRON = """
    --hybrid-override-pattern MEM*EMEM*E --num-layers 10 --hidden-size 512 --num-attention-heads 8 --seq-length 512
    --group-query-attention --num-query-groups 2 --max-position-embeddings 512 --position-embedding-type none
    --normalization RMSNorm --squared-relu --disable-bias-linear --untie-embeddings-and-output-weights
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-grouped-gemm --expert-model-parallel-size 2
    --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none
    --moe-shared-expert-intermediate-size 512 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --disable-mamba-mem-eff-path --clip-grad 1000000
"""
PADDED = "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
RECIPES = {
    "bf16": "",
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "delayed": "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 16 --fp8-amax-compute-algo max",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
}
OVERLAP = "--expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm --delay-wgrad-compute"
MANY_CONNECTIONS = {"--overlap-moe-expert-parallel-comm", "--use-megatron-fsdp"}
"""The flags for which Megatron-LM requires that CUDA_DEVICE_MAX_CONNECTIONS is above 1."""
GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-scope"
MAMBA_SPEC = "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"


@dataclass(frozen=True)
class Model:
    """The flags of a model, and the additional flags that capture it in graphs."""

    flags: str
    graphs: str
    recipe: str = "tensorwise"
    programs: tuple[str, ...] = GPT


MODELS = {
    "experts": Model(f"{LAYERS} {EXPERTS} {PADDED}", f"{GRAPHS} attn moe"),
    "hybrid": Model(f"{NEMOTRON} {PADDED}", f"{GRAPHS} mamba attn moe", programs=HYBRID),
    "overlap": Model(f"{LAYERS} {EXPERTS} {OVERLAP} --add-qkv-bias", f"{GRAPHS} attn moe_router", "bf16"),
    "dense": Model(f"{LAYERS} --ffn-hidden-size 4096", f"{GRAPHS} attn mlp"),
    "own": Model("", f"{GRAPHS} attn", "bf16"),
}


def main() -> int:
    if sys.argv[1:2] == [AS_RANK]:
        be_rank(*sys.argv[2:])
        return 0
    if sys.argv[1:2] == [DRAW]:
        draw_recorded(*sys.argv[2:])
        return 0
    options = parse()
    model = MODELS[options.model]
    recipe = RECIPES[options.recipe or model.recipe]
    flags = [*shlex.split(f"{model.flags} {recipe}"), "--train-iters", str(options.iterations)]
    flags += ["--global-batch-size", str(options.gpus * options.microbatches), *options.flags]
    graphs = shlex.split(model.graphs if options.graphs is None else options.graphs)
    steps = range(WARMUP + 1, options.iterations + 1, 4)
    name, folder = f"Megatron-LM, {options.model}", options.out.resolve()
    return run_and_report(
        train(name, options.checkout, model.programs, flags, graphs, folder, options.gpus, steps), options
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", metavar="CHECKOUT", type=Path, help="a checkout of Megatron-LM, 0.16 or later")
    parser.add_argument("--model", choices=MODELS, default="experts", help="default: %(default)s")
    parser.add_argument("--recipe", choices=RECIPES, help="default: bf16 for overlap and own, else tensorwise")
    parser.add_argument("--graphs", help="the flags that turn graphs on; default: depends on --model")
    parser.add_argument("--microbatches", type=int, default=4, help="per step and GPU; default: %(default)s")
    add_arguments(parser, "megatron-lm")
    parser.usage = "%(prog)s CHECKOUT [OPTIONS] [-- FLAGS of pretrain_gpt.py, for all runs]"
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:split])
    options.flags = sys.argv[split + 1 :]
    options.checkout = options.checkout.expanduser().resolve()
    require(parser, options.checkout, MODELS[options.model].programs)
    return options


def require(parser: argparse.ArgumentParser, checkout: Path, programs: tuple[str, ...]) -> None:
    """Exit with a usage error if the checkout contains none of the ``programs``, or if a package is missing."""
    if not any((checkout / program).is_file() for program in programs):
        parser.error(f"{checkout} contains no {programs[-1]}: CHECKOUT must be a checkout of Megatron-LM")
    for needed in ("te_graph_fixes", "transformer_engine", "torch"):
        if importlib.util.find_spec(needed) is None:
            parser.error(f"{sys.executable} cannot import {needed}: install {needed.replace('_', '-')}")


def train(
    name: str,
    checkout: Path,
    programs: tuple[str, ...],
    flags: list[str],
    graphs: list[str],
    folder: Path,
    gpus: int = 2,
    steps: range = range(0),
    stages: tuple[tuple[str, ...], ...] = ((),),
) -> Training:
    """Return a training that runs the first of the ``programs`` that the checkout contains."""
    program = next(program for program in programs if (checkout / program).is_file())
    if program == "pretrain_mamba.py":
        flags = [*shlex.split(MAMBA_SPEC), *flags]
    return Training(
        name=name,
        program=[
            __file__,
            AS_RANK,
            ",".join(map(str, steps)),
            str(checkout / program),
            *shlex.split(COMMON),
            *flags,
        ],
        graphs=graphs,
        folder=folder,
        gpus=gpus,
        working_folder=checkout,
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "32" if MANY_CONNECTIONS & {*flags} else "1"},
        stages=stages,
    )


def be_rank(steps: str, program: str, *flags: str) -> None:
    """Run Megatron-LM's program in this process, and print the norms of gradients in the ``steps``."""
    sys.path[:1] = [os.path.dirname(program)]
    sys.argv = [program, *flags]
    prepare()
    if steps:
        watch_steps({int(step) for step in steps.split(",")})
    runpy.run_path(program, run_name="__main__")


def watch_steps(steps: set[int]) -> None:
    """Make Megatron-LM's training loop print the norms of gradients in the ``steps``."""
    from megatron.training import training

    set_up = training.setup_model_and_optimizer

    def set_up_and_watch(*args: object, **kwargs: object) -> tuple[object, ...]:
        model, optimizer, *others = set_up(*args, **kwargs)
        watch(model, optimizer, steps)
        return (model, optimizer, *others)

    training.setup_model_and_optimizer = set_up_and_watch


def draw_recorded(png: str, *sources: str) -> None:
    """Draw earlier runs: norms by kind of parameter for a hybrid model, or else the gradient norm of each step.

    Each source is TITLE=FOLDER. FOLDER is the ``--out`` folder of an earlier run.
    """
    panels = []
    for source in sources:
        title, _, folder = source.rpartition("=")
        runs = load(Path(folder) / "runs.json")
        panels.append(by_kind(title, runs) if is_hybrid(runs) else over_steps(title, "grad norm", runs))
    draw(Path(png), *panels)


if __name__ == "__main__":
    sys.exit(main())
