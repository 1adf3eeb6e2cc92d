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

MODULES = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")
RECIPES = ("mxfp8", "nvfp4", "fp8-block", "fp8-current", "fp8-delayed")
IN_FLIGHT = (1, 1, -1, 1, -1, -1)
SETTINGS: dict[str, dict[str, Any]] = {
    "cached": {"order": IN_FLIGHT},
    "cached, one graph": {},
    "not cached": {"order": IN_FLIGHT, "cache": False, "fit": True},
    "plain grads": {"order": IN_FLIGHT, "fused": False, "mark_first": False, "bias": True},
    "delayed wgrads": {"order": (1, 1, -1, -1, -1.5, -1.5), "delay": True, "mark_first": False, "bias": True},
    "quantized weights": {"order": IN_FLIGHT, "fp8_params": True},
}
UNLIKE = ("fp8-delayed", "not cached")
"""Not alike: eager keeps the weights of the first microbatch, a graph quantizes them again with the scales by then."""


def combinations(part: str = "1/1", recipes: Sequence[str] = ()) -> list[tuple[str, str, str]]:
    """Module, recipe and setting. Every part has all of each."""
    every = itertools.product(MODULES, recipes or RECIPES, SETTINGS)
    first, step = map(int, part.split("/"))
    return [one for one in every if one[1:] != UNLIKE][first - 1 :: step]


def measure(module: str, recipe: str, setting: str) -> dict[str, Any]:
    """The largest errors of two steps, or what was raised."""
    from te_graph_fixes.verify import training

    training.TOKENS = 128
    try:
        found = training.compare(module=module, recipe=recipe, steps=2, **SETTINGS[setting])["errors"]
    except training.Skipped as why:
        return {"skipped": str(why)}
    except Exception as error:
        return {"wrong": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    wrong = {name: round(max(numbers), 3) for name, numbers in found.items() if any(numbers)}
    return {"wrong": wrong} if wrong else {"right": True}


if __name__ == "__main__":
    import transformer_engine.pytorch  # noqa: F401

    import te_graph_fixes.verify.training  # noqa: F401

    for case in combinations(*sys.argv[1:2], recipes=sys.argv[2:]):
        sys.stdout.flush()
        if not (child := os.fork()):
            print(json.dumps({"case": case, **measure(*case)}), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
