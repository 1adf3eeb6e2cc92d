"""Compare graphs with eager runs for each module, recipe and setting, on the GPU that the simulator stands in for.

    TE_SIMULATOR_GPU=blackwell python -m tests.simulator -m tests.support.recipe_matrix [PART [RECIPE ...]]

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


IN_THE_DRIVER = {
    "Linear": "linear",
    "LayerNormLinear": "layernorm_linear",
    "LayerNormMLP": "layernorm_mlp",
    "GroupedLinear": "grouped_linear",
}


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
    from tests.support.matrix_modules import MAKERS
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
