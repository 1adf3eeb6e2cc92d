"""What is trained, in which recipe and how: graph replay against eager, on the GPU that the simulator stands in for.

    TE_SIMULATOR_GPU=blackwell python -m tests.simulator -m tests.matrix [PART [RECIPE ...]]

prints one JSON line for each combination: its errors other than 0.0 ("right" where there are none), or why
TransformerEngine (TE) does not take it. ``TE_GRAPH_FIXES=off`` gives those of TE as it is. PART, ``2/7`` say, is every
seventh of them, from the second on. Each runs in a fork of this process, since a capture that fails may damage it.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

IN_FLIGHT = (1, 1, -1, 1, -1, -1)
SETTINGS: dict[str, dict[str, Any]] = {
    "cached": {"order": IN_FLIGHT},
    "cached, one graph": {},
    "not cached": {"order": IN_FLIGHT, "cache": False, "fit": True},
    "plain grads": {"order": IN_FLIGHT, "fused": False, "mark_first": False, "bias": True},
    "delayed wgrads": {"order": (1, 1, -1, -1, -1.5, -1.5), "delay": True, "mark_first": False, "bias": True},
    "quantized weights": {"order": IN_FLIGHT, "fp8_params": True},
    "quantized weights, FusedAdam": {"order": IN_FLIGHT, "fp8_params": True, "adam": True},
    "expert without tokens": {"order": IN_FLIGHT, "experts": 4, "uneven": True},
    "evaluation": {"order": IN_FLIGHT, "evaluate": True},
}
RECIPES = ("mxfp8", "nvfp4", "fp8-block", "fp8-current", "fp8-delayed")
OPERATIONS = {"mark_first": False, "cache": None}
"""te.ops quantize their weights in every forward."""
DENSE = tuple(setting for setting in SETTINGS if setting != "expert without tokens")
MODULES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("Linear", "LayerNormLinear", "LayerNormMLP"), DENSE),
    "GroupedLinear": tuple(SETTINGS),
    "TransformerLayer": tuple(setting for setting in DENSE if setting != "delayed wgrads"),
    **dict.fromkeys(
        ("ops.Linear", "ops.GroupedLinear"), ("not cached", "plain grads", "quantized weights", "evaluation")
    ),
}
"""What can be trained, in those settings that it has."""


def combinations(part: str = "1/1", recipes: Sequence[str] = ()) -> list[tuple[str, str, str]]:
    """Module, recipe and setting. Every part has all of each."""
    every = [
        (module, recipe, setting)
        for module, settings in MODULES.items()
        for setting, recipe in itertools.product(settings, recipes or RECIPES)
    ]
    first, step = map(int, part.split("/"))
    return every[first - 1 :: step]


def measure(module: str, recipe: str, setting: str) -> dict[str, Any]:
    """The largest errors of two steps, or what was raised."""
    from te_graph_fixes.verify import training

    training.TOKENS = 128
    training.OTHERS |= {"TransformerLayer": transformer_layer, "ops.Linear": linear, "ops.GroupedLinear": grouped}
    options = {**SETTINGS[setting], **(OPERATIONS if module.startswith("ops.") else {})}
    try:
        found = training.compare(module=module, recipe=recipe, steps=2, **options)["errors"]
    except training.Skipped as why:
        return {"skipped": str(why)}
    except Exception as error:
        return {"wrong": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    wrong = {name: round(max(numbers), 3) for name, numbers in found.items() if any(numbers)}
    return {"wrong": wrong} if wrong else {"right": True}


def transformer_layer(options: dict[str, Any]) -> Any:
    """A layer with two sequences, whose attention is TE's own of plain torch operations."""
    import transformer_engine.pytorch as te

    os.environ.update(NVTE_FLASH_ATTN="0", NVTE_FUSED_ATTN="0", NVTE_MASKED_SOFTMAX_FUSION="0")
    options = {name: value for name, value in options.items() if name != "delay_wgrad_compute"}

    class Layer(te.TransformerLayer):  # type: ignore[misc]
        def forward(self, x: Any, **marks: bool) -> Any:
            return super().forward(x.view(-1, 2, 128), **marks).view(x.shape)

    return Layer(128, 256, 4, fuse_qkv_params=True, hidden_dropout=0.0, attention_dropout=0.0, **options), ()


def linear(options: dict[str, Any]) -> Any:
    """A projection of te.ops."""
    import transformer_engine.pytorch as te

    return te.ops.Sequential(te.ops.Linear(128, 128, **_of_operation(options))), ()


def grouped(options: dict[str, Any]) -> Any:
    """Two experts of te.ops, without a bias, whose grad a Triton kernel sums up."""
    import torch
    import transformer_engine.pytorch as te

    from te_graph_fixes.verify import training

    made = getattr(te.ops, "GroupedLinear", None)
    if made is None:
        raise training.Skipped("te.ops.GroupedLinear comes with TransformerEngine 2.14")
    if hasattr(made, "_fuser_forward_grouped_tensor"):
        raise training.Skipped(
            "te.ops.GroupedLinear needs kernels of grouped tensors, which are not simulated, in a graph"
        )
    splits = torch.tensor([64, 64], device="cpu")
    return te.ops.Sequential(made(2, 128, 128, **_of_operation(options | {"bias": False}))), (splits,)


def _of_operation(options: dict[str, Any]) -> dict[str, Any]:
    names = {"params_dtype": "dtype", "fuse_wgrad_accumulation": "accumulate_into_main_grad"}
    return {names.get(name, name): value for name, value in options.items() if name != "delay_wgrad_compute"}


if __name__ == "__main__":
    import transformer_engine.pytorch  # noqa: F401

    import te_graph_fixes.verify.training  # noqa: F401

    for case in combinations(*sys.argv[1:2], recipes=sys.argv[2:]):
        sys.stdout.flush()
        if not (child := os.fork()):
            print(json.dumps({"case": case, **measure(*case)}), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
