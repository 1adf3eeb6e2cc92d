"""Trainings under ``te_graph_fixes.check``, in a child on the simulator: one JSON line for each.

    python -m tests.simulator tests/check_training.py [--without FIX,FIX] OPTIONS ...

OPTIONS are those of `verify.training.Setup` as JSON, or the name of a case of `verify`. A line has what was found,
whether the training was the same bit for bit as without the check, and how much was compared.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import te_graph_fixes

if sys.argv[1:2] == ["--without"]:
    te_graph_fixes.activate(
        only=[] if sys.argv[2] == "all" else None, disable=sys.argv[2].split(",") * (sys.argv[2] != "all")
    )
    del sys.argv[1:3]

from te_graph_fixes.checking import twins
from te_graph_fixes.verify.cases import CASES
from te_graph_fixes.verify.training import Setup, te, train

te.GroupedLinear = type("Experts", (te.GroupedLinear,), {})  # a subclass, as in Megatron-Core


def values(setup: Setup) -> list[torch.Tensor]:
    torch.manual_seed(7)
    steps = list(train(setup, graphed=True))
    found = [x for step in steps for x in (*step.outputs, *step.dgrads, *step.wgrads, *step.seen_by_hooks)]
    return [*found, torch.get_rng_state()]


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def measure(options: dict[str, Any]) -> dict[str, Any]:
    setup = Setup(**options)
    without = values(setup)
    te_graph_fixes.check(2)
    checked = values(setup)
    found = twins.current[0].finish()
    looks = [each.partition("; looks like ")[2] for each in found.mismatches]
    return {
        "same": len(without) == len(checked) and all(map(alike, without, checked)),
        "found": found.mismatches,
        "hints": sorted({fix for look in looks if look for fix in look.split(" or ")}),
        **found.totals,
    }


for argument in sys.argv[1:]:
    given = json.loads(argument) if argument.startswith("{") else dict(CASES[argument].options)
    print(json.dumps(measure(given)), flush=True)
