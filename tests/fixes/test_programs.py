"""Fixes that are about several modules and what happens to them between replays, on the simulator: whole programs."""

from __future__ import annotations

from typing import Any

import pytest

from te_graph_fixes.verify.cases import CASES, Case
from tests.support.child import measured

STEPS = ("step",) * 3

OTHERS: dict[str, dict[str, Any]] = {
    "subclass-inside": {"modules": ("linear", "SpecialInside"), "together": True},
    "enabled-by-module": {"modules": ("Block", "linear"), "together": True, "in_bf16": (1,)},
    "bf16-inside": {"modules": ("KeptInBf16", "linear"), "together": True},
    "bf16-graph-used-eagerly-later": {
        "recipe": "bf16",
        "other": "delayed",
        "events": ("step", "evaluate_in_other", "step"),
    },
    "eager-before-replay": {"modules": ("nested_operations",), "events": ("eager_step", "step")},
    "graphed-teacher": {"first": "teacher"},
    "eager-after-frozen": {"modules": ("Block",), "first": "frozen", "not_captured": (0,)},
    "evaluation-between": {"modules": ("Block",), "events": ("step", "evaluate", "step", "evaluate", "step")},
    "several-autocasts": {"modules": ("linear", "Block", "linear"), "autocasts": "each", "frozen": (0,)},
    "operations-beside": {"modules": ("operation", "nested_operations", "linear"), "together": True},
    "own-autocast-alone": {"modules": ("OwnAutocast", "linear"), "recipe": "bf16", "other": "delayed"},
    "own-autocast-in-another-delayed": {"modules": ("OwnAutocast", "linear"), "other": "delayed"},
    "checkpoints-of-graphs-and-eager": {
        "modules": ("Block", "linear", "linear"),
        "not_captured": (1,),
        "recompute": True,
    },
}
"""Programs that are not in ``verify``."""

SPOILT = {
    "nested-autocast": ("nested-modules", "subclass-inside", "enabled-by-module", "bf16-inside"),
    "backward-amax-reduction": ("frozen-first", "self-distillation", "plain-torch-first", "graphed-teacher"),
    "rng-states-at-replay": ("other-rng-states",),
    "fp8-state-at-replay": (
        "forward-method",
        "own-autocast",
        "checkpoint",
        "operations-in-bf16",
        "eager-before-replay",
    ),
}
"""Programs that each fix is needed for."""

PROGRAMS = {name: CASES[name] for names in SPOILT.values() for name in names if name in CASES} | {
    name: Case(name, (), "programs:compare", {"recipe": "delayed", "events": STEPS, "takes_grads": True, **options})
    for name, options in OTHERS.items()
}


def test_programs_are_as_without_graphs() -> None:
    found = measured(*PROGRAMS.values())
    assert {name: line.get("error", line) for name, line in found.items()} == dict.fromkeys(PROGRAMS, 0.0)


@pytest.mark.parametrize(("fix_id", "name"), [(fix_id, name) for fix_id, names in SPOILT.items() for name in names])
def test_without_the_fix_they_differ(fix_id: str, name: str) -> None:
    found = measured(PROGRAMS[name], TE_GRAPH_FIXES_DISABLE=fix_id)[name]
    assert found["outcome"] == "failed" or found["error"] > 0.05, found
