"""Combinations of options, graph replay against eager: any three options meet in every combination of values."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from te_graph_fixes.verify.cases import PIPELINED, Case
from te_graph_fixes.verify.runner import Child

ORDERS = {"none": None, "plain": (1, -1), "pipelined": tuple(entry for entry in PIPELINED if entry % 1 == 0)}
DELAYED = {
    "none": None,
    "plain": (1, -1, -1.5),
    "pipelined": PIPELINED,
    "late": (1, 2, 1, -2, -1, -2.5, 2, -1.5, -1, -2, -1.5, -2.5),
}

OPTIONS: dict[str, tuple[Any, ...]] = {
    "module": ("GroupedLinear", "Linear", "LayerNormLinear", "LayerNormMLP"),
    "recipe": ("bf16", "fp8-delayed", "fp8-current", "fp8-block"),
    "fp8_params": (False, True),
    "fused": (True, False),
    "bias": (False, True),
    "experts": (1, 2, 8),
    "uneven": (False, True),
    "order": ("none", "plain", "pipelined", "late"),
    "delay": (False, True),
    "warmup": (3, 1),
    "cache": (None, False),
}


def _legal(options: dict[str, Any]) -> bool:
    experts = options["module"] == "GroupedLinear"
    return (
        (experts or (options["experts"] == 1 and not options["uneven"]))
        and not (options["uneven"] and options["experts"] == 1)
        # Delayed scaling moves its scales between microbatches, so that weights quantized again are other weights.
        and not (options["cache"] is False and options["recipe"] in ("bf16", "fp8-delayed"))
        and not (options["fp8_params"] and options["recipe"] == "bf16")
        and (options["delay"] or options["order"] != "late")
    )


def _sweep() -> Iterator[dict[str, Any]]:
    """Legal combinations of options that together have every combination of three options' values."""
    names = list(OPTIONS)
    candidates = [dict(zip(names, values, strict=True)) for values in itertools.product(*OPTIONS.values())]
    candidates = [options for options in candidates if _legal(options)]
    random.Random(6).shuffle(candidates)
    seen: set[tuple[tuple[str, Any], ...]] = set()
    for options in candidates:
        met = set(itertools.combinations(options.items(), 3))
        if met - seen:
            seen |= met
            yield options


def _case(options: dict[str, Any]) -> Case:
    orders = DELAYED if options["delay"] else ORDERS
    name = "-".join(f"{option}={value}" for option, value in options.items())
    steps = 2 if options["order"] == "pipelined" else 3
    return Case(
        name, (), "training:compare", {**options, "order": orders[options["order"]], "reuse": True, "steps": steps}
    )


CASES = [_case(options) for options in _sweep()]
BLACKWELL = [
    Case(f"{module}-{recipe}", (), "training:compare", {"module": module, "recipe": recipe})
    for module in ("GroupedLinear", "Linear")
    for recipe in ("mxfp8", "nvfp4")
]


@pytest.mark.parametrize("case", CASES + BLACKWELL, ids=lambda case: case.name)
def test_replay_is_bit_identical_to_eager(case: Case, child: Child) -> None:
    found = child.measure(case)
    if found.outcome == "skipped":
        pytest.skip(found.detail)
    assert found.right, found
