"""Combinations of options, graph replay against eager: any three options meet in every combination of values."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from te_graph_fixes.verify import cases as verify
from te_graph_fixes.verify.cases import PIPELINED, Case
from te_graph_fixes.verify.runner import Child

EXPERTS = ("grouped_linear", "eight_experts", "uneven_experts")
ORDERS = {"none": (), "plain": (1, -1), "pipelined": tuple(entry for entry in PIPELINED if entry % 1 == 0)}
DELAYED = {
    "none": (),
    "plain": (1, -1, -1.5),
    "pipelined": PIPELINED,
    "late": (1, 2, 1, -2, -1, -2.5, 2, -1.5, -1, -2, -1.5, -2.5),
}

OPTIONS: dict[str, tuple[Any, ...]] = {
    "module": (*EXPERTS, "linear", "layernorm_linear", "layernorm_mlp"),
    "recipe": ("bf16", "delayed", "current", "block"),
    "fp8_params": (False, True),
    "fused": (True, False),
    "bias": (False, True),
    "order": ("none", "plain", "pipelined", "late"),
    "delay": (False, True),
    "warmup": (3, 1),
    "cached": (True, False),
}


def _legal(options: dict[str, Any]) -> bool:
    return (
        # Delayed scaling moves its scales between microbatches, so that weights quantized again are other weights.
        not (not options["cached"] and options["recipe"] in ("bf16", "delayed"))
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
    order = (DELAYED if options["delay"] else ORDERS)[options["order"]]
    weights = "cached" if options["cached"] and options["recipe"] != "bf16" else "marked"
    given = {name: value for name, value in options.items() if name not in ("module", "cached")}
    more = {"modules": (options["module"],) * int(max(order or (1,))), "order": order, "weights": weights}
    name = "-".join(f"{option}={value}" for option, value in options.items())
    return Case(name, (), "programs:compare", {**given, **more, "reuse": bool(order), "microbatches": 3, **CLEAN})


CLEAN = {"drops_dummies": True, "clean_start": True}
CASES = [_case(options) for options in _sweep()]
BLACKWELL = [verify.CASES[f"{name}-{recipe}"] for name in ("experts", "linear") for recipe in ("mxfp8", "nvfp4")]


@pytest.mark.parametrize("case", CASES + BLACKWELL, ids=lambda case: case.name)
def test_replay_is_bit_identical_to_eager(case: Case, child: Child) -> None:
    found = child.measure(case)
    if found.outcome == "skipped":
        pytest.skip(found.detail)
    assert found.right, found
