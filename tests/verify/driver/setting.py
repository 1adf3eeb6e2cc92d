"""The state shared by the driver's modules: the program, its recipes, random values and ranks."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker

from .program import Program, Skipped

os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"
os.environ.update(NVTE_FLASH_ATTN="0", NVTE_FUSED_ATTN="0", NVTE_MASKED_SOFTMAX_FUSION="0")
os.environ.update(NVTE_UnfusedDPA_Emulate_FP8="1")
SIMULATED = torch.cuda.get_device_name().startswith("simulated")
HIDDEN, TOKENS = (32, 64) if SIMULATED else (128, 256)  # block scaling on a GPU requires multiples of 128
RATE = 0.1
OPTIONS: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cuda"}
RECIPES = {
    "delayed": (recipes.DelayedScaling, "is_fp8_available"),
    "current": (recipes.Float8CurrentScaling, "is_fp8_available"),
    "block": (recipes.Float8BlockScaling, "is_fp8_block_scaling_available"),
    "mxfp8": (recipes.MXFP8BlockScaling, "is_mxfp8_available"),
    "nvfp4": (recipes.NVFP4BlockScaling, "is_nvfp4_available"),
}
"""TE's class of each recipe, and the name of TE's function that tells whether this GPU supports the recipe."""
program: Any = SimpleNamespace(**vars(Program()))  # the current program, set by `use`
tracker = CudaRNGStatesTracker()


def use(chosen: Program) -> None:
    """Select the program to run."""
    vars(program).update(vars(chosen))


def process_group() -> Any:
    """Return the process group, or None if the program has no ranks."""
    return dist.group.WORLD if program.ranks else None


def autocast(name: str) -> Any:
    """Return an autocast in the recipe ``name``. For ``bf16``, FP8 is disabled."""
    if name == "bf16":
        return te.autocast(enabled=False)
    calibrating = program.calibrating
    options = {"enabled": not calibrating, "calibrating": calibrating, "amax_reduction_group": process_group()}
    return te.autocast(recipe=make_recipe(name), **options)


def make_recipe(name: str) -> Any:
    """Return TE's recipe of this name (None for ``bf16``) or, if the program calibrates FP8, delayed scaling."""
    if program.calibrating:
        return recipes.DelayedScaling(amax_history_len=3)
    if name == "bf16":
        return None
    in_fp8 = program.fp8_attention and name in ("delayed", "current")
    attention = {"fp8_dpa": True, "fp8_mha": program.fp8_mha} if in_fp8 else {}
    return RECIPES[name][0](**attention)


def require(*names: str) -> None:
    """Raise `Skipped` if this GPU does not support one of the recipes."""
    for name in set(names) - {"bf16"}:
        has, why = getattr(te, RECIPES[name][1])(return_reason=True)
        if not has:
            raise Skipped(" ".join(why.split()))


def hidden() -> int:
    """Return the hidden size."""
    return program.hidden or HIDDEN


def random(scale: float = 1.0) -> torch.Tensor:
    """Return random values for one microbatch."""
    return scale * torch.randn(TOKENS, hidden(), dtype=torch.bfloat16, device="cuda")


def sample() -> torch.Tensor:
    """Return a sample argument for a capture, without drawing random numbers."""
    return torch.ones(TOKENS, hidden(), dtype=torch.bfloat16, device="cuda")


def the_tracker() -> Any:
    """Return a function that returns the RNG tracker, or None if the program has no tracker."""
    return (lambda: tracker) if program.tracker else None


def seed_tracker(seed: int) -> None:
    tracker.reset()
    tracker.add("model-parallel-rng", seed)
    tracker.set_states(tracker.get_states())  # as in checkpoints: other dicts, with the same generators
