"""Compare graphs with eager runs for each module, recipe and setting, on the GPU that the simulator stands in for.

    TE_SIMULATOR_GPU=blackwell python -m tests.simulator -m tests.support.recipe_matrix [PART [RECIPE ...]]

prints one JSON line for each combination: its errors other than 0.0 ("right" where there are none), or why
TransformerEngine (TE) does not take it. ``TE_GRAPH_FIXES=off`` gives those of TE as it is. PART, ``2/7`` say, is every
seventh of them, from the second on. Each runs in a fork of this process, since a capture that fails may damage it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

IN_FLIGHT = (1, 1, -1, 1, -1, -1)
TRAINED = {"fused": True, "weights": "cached", "drops_dummies": True, "clean_start": True}
PLAIN = {"weights": "plain", "bias": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "cached": {"order": IN_FLIGHT},
    "cached, one graph": {"microbatches": 3},
    "not cached": {"order": IN_FLIGHT, "weights": "marked", "fit": True},
    "plain grads": {"order": IN_FLIGHT, "fused": False, **PLAIN},
    "delayed wgrads": {"order": (1, 1, -1, -1, -1.5, -1.5), "delay": True, **PLAIN},
    "quantized weights": {"order": IN_FLIGHT, "fp8_params": True},
    "quantized weights, FusedAdam": {"order": IN_FLIGHT, "fp8_params": True, "optimizer": "adam of master weights"},
    "expert without tokens": {"order": IN_FLIGHT, "modules": ("uneven_experts",)},
    "evaluation": {"order": IN_FLIGHT, "events": ("step", "evaluate", "evaluate_in_bf16") * 2},
}
GPU_SPLITS = "GroupedLinear, splits on the GPU"
RECIPES = ("mxfp8", "nvfp4", "fp8-block", "fp8-current", "fp8-delayed")
DENSE = tuple(setting for setting in SETTINGS if setting != "expert without tokens")
MODULES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("Linear", "LayerNormLinear", "LayerNormMLP"), DENSE),
    "GroupedLinear": tuple(SETTINGS),
    "TransformerLayer": tuple(setting for setting in DENSE if setting != "delayed wgrads"),
    **dict.fromkeys(
        ("ops.Linear", "ops.GroupedLinear"), ("not cached", "plain grads", "quantized weights", "evaluation")
    ),
    **dict.fromkeys(
        ("LayerNormMLP, recomputed", "TransformerLayer, dropout", "GroupedLinear, padded"), ("cached", "not cached")
    ),
    GPU_SPLITS: ("cached", "not cached", "plain grads", "delayed wgrads", "quantized weights", "evaluation"),
}
"""What can be trained, in those settings that it has."""


def combinations(part: str = "1/1", recipes: Sequence[str] = ()) -> list[tuple[str, str, str]]:
    """Yield module, recipe and setting. Every part contains all modules, recipes and settings."""
    every = [
        (module, recipe, setting)
        for module, settings in MODULES.items()
        for setting, recipe in itertools.product(settings, recipes or RECIPES)
    ]
    first, step = map(int, part.split("/"))
    return every[first - 1 :: step]


def measure(module: str, recipe: str, setting: str) -> dict[str, Any]:
    """Return the largest errors of two steps, or what was raised."""
    from tests.verify import programs
    from tests.verify.driver import modules
    from tests.verify.driver.program import Skipped

    modules.MODULES.update(MAKERS)
    plain = {"weights": "plain"} if module.startswith("ops.") else {}  # they quantize their weights in every forward
    program = {"modules": (IN_THE_DRIVER.get(module, module),), "recipe": recipe.removeprefix("fp8-"), **TRAINED}
    try:
        found = programs.compare(**{**program, **SETTINGS[setting], **plain})
    except Skipped as why:
        return {"skipped": str(why)}
    except Exception as error:
        return {"wrong": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    wrong = {name: round(max(numbers), 3) for name, numbers in found["errors"].items() if any(numbers)}
    return {"wrong": wrong} if wrong else {"right": True}


def layer(dropout: float = 0.0) -> Any:
    """Return a layer with two sequences, whose attention is TE's own of plain torch operations."""
    from tests.explore.kinds import Layer, options_of_attention
    from tests.verify.driver.setting import hidden

    size, options = hidden(), {**options_of_attention(), "attention_dropout": dropout}
    return Layer(size, 2 * size, 2, hidden_dropout=dropout, **options)


def recomputed() -> Any:
    """Return a block whose activations are recomputed in its backward."""
    import torch
    import transformer_engine.pytorch as te

    from tests.verify import programs
    from tests.verify.driver.modules import layernorm_mlp

    class Recomputing(torch.nn.Module):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.inner = layernorm_mlp()

        def forward(self, x: Any) -> Any:
            return te.checkpoint(self.inner, x)

    programs.require_recomputation()
    return Recomputing()


def uneven() -> Any:
    """Create three experts, of which the last gets no tokens."""
    import transformer_engine.pytorch as te

    from tests.verify.driver.setting import HIDDEN, OPTIONS, TOKENS

    class Uneven(te.GroupedLinear):  # type: ignore[misc]
        def forward(self, x: Any, **marks: bool) -> Any:
            return super().forward(x, [TOKENS // 2, TOKENS // 2, 0], **marks)

    return Uneven(3, HIDDEN, HIDDEN, **OPTIONS)


def padded() -> Any:
    """Create two experts whose numbers of tokens no recipe accepts, so TE's modules pad and unpad them."""
    import transformer_engine.pytorch as te

    from tests.verify.driver.setting import HIDDEN, OPTIONS, TOKENS

    splits = [TOKENS // 2 - 7, TOKENS // 2 + 7]

    class Padded(te.GroupedLinear):  # type: ignore[misc]
        def __init__(self, *sizes: int, **options: Any) -> None:
            super().__init__(*sizes, **options)
            self.pad, self.unpad = te.Fp8Padding(2), te.Fp8Unpadding(2)

        def forward(self, x: Any, **marks: bool) -> Any:
            rows, padded_splits = self.pad(x, splits)
            return self.unpad(super().forward(rows, padded_splits, **marks), splits)

    return Padded(2, HIDDEN, HIDDEN, **OPTIONS)


def operation() -> Any:
    """Return a projection of te.ops."""
    import transformer_engine.pytorch as te

    from tests.verify.driver.setting import HIDDEN

    return te.ops.Sequential(te.ops.Linear(HIDDEN, HIDDEN, **_of_operation()))


def grouped_operation() -> Any:
    """Create two experts of te.ops without a bias, because a Triton kernel sums the gradient of a bias."""
    import transformer_engine.pytorch as te

    from tests.verify.driver.program import Skipped
    from tests.verify.driver.setting import HIDDEN

    made = getattr(te.ops, "GroupedLinear", None)
    if made is None:
        raise Skipped("te.ops.GroupedLinear comes with TransformerEngine 2.14")
    splits = _splits(hasattr(made, "_fuser_forward_grouped_tensor"))

    class Grouped(te.ops.Sequential):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return super().forward(x, splits)

    return Grouped(made(2, HIDDEN, HIDDEN, **{**_of_operation(), "bias": False}))


def grouped_on_gpu() -> Any:
    """Create two experts without a bias with kernels of grouped tensors. Only the GPU knows their tokens."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.module import grouped_linear

    from tests.verify.driver.program import Skipped
    from tests.verify.driver.setting import HIDDEN, OPTIONS

    if not hasattr(grouped_linear._GroupedLinear, "_make_grouped_tensor"):
        raise Skipped("GroupedLinear has no kernels of grouped tensors before TransformerEngine 2.17")
    options: dict[str, Any] = {"bias": False}
    if "use_grouped_tensor" in inspect.signature(te.GroupedLinear.__init__).parameters:  # TE 2.20
        options["use_grouped_tensor"] = True
    else:
        os.environ["NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM"] = "1"
    splits = _splits(on_gpu=True)

    class Experts(te.GroupedLinear):  # type: ignore[misc]
        def forward(self, x: Any, **marks: bool) -> Any:
            return super().forward(x, splits, **marks)

    return Experts(2, HIDDEN, HIDDEN, **{**OPTIONS, **options})


def _splits(on_gpu: bool) -> Any:
    import torch

    from tests.verify.driver.setting import TOKENS

    if on_gpu:
        return torch.tensor([TOKENS // 4, TOKENS * 3 // 4], device="cuda")
    return torch.tensor([TOKENS // 2] * 2, device="cpu")


def _of_operation() -> dict[str, Any]:
    from tests.verify.driver.setting import OPTIONS

    names = {"params_dtype": "dtype", "fuse_wgrad_accumulation": "accumulate_into_main_grad"}
    return {names.get(name, name): value for name, value in OPTIONS.items() if name != "delay_wgrad_compute"}


MAKERS: dict[str, Callable[[], Any]] = {
    "TransformerLayer": layer,
    "ops.Linear": operation,
    "ops.GroupedLinear": grouped_operation,
    "LayerNormMLP, recomputed": recomputed,
    "TransformerLayer, dropout": functools.partial(layer, 0.1),
    "GroupedLinear, padded": padded,
    "uneven_experts": uneven,
    GPU_SPLITS: grouped_on_gpu,
}
"""What makes modules that the driver does not have."""
IN_THE_DRIVER = {
    "Linear": "linear",
    "LayerNormLinear": "layernorm_linear",
    "LayerNormMLP": "layernorm_mlp",
    "GroupedLinear": "grouped_linear",
}


def main(*arguments: str) -> None:
    """Run the combinations that the arguments name, and print a JSON line for each."""
    import transformer_engine.pytorch  # noqa: F401

    from tests.verify.driver import setting

    setting.HIDDEN = setting.TOKENS = 128  # a smaller weight has one layout of NVFP4's scales
    import tests.verify.programs  # noqa: F401

    for case in combinations(*arguments[:1], recipes=arguments[1:]):
        sys.stdout.flush()
        if not (child := os.fork()):
            print(json.dumps({"case": case, **measure(*case)}), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
