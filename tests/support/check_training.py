"""Trainings under ``te_graph_fixes.check``, in a child on the simulator: one JSON line for each.

    python -m tests.simulator tests/support/check_training.py [--without FIX,FIX] OPTIONS ...

OPTIONS are those of a `Program` as JSON, or the name of a case of `verify`. A line has what was found,
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
from te_graph_fixes.verify.driver.comparison import error
from te_graph_fixes.verify.driver.events import train
from te_graph_fixes.verify.driver.program import Program
from te_graph_fixes.verify.driver.setting import use

COMPUTED = ("outputs", "dgrads", "wgrads", "parameters", "FP8 state", "RNG state")


def values() -> list[torch.Tensor | None]:
    seen = train(graphed=True)
    return [x for name, found in seen.items() if name.partition(": ")[2] in COMPUTED for x in found]


def measure(options: dict[str, Any]) -> dict[str, Any]:
    use(Program(**options))
    without = values()
    te_graph_fixes.check(2)
    checked = values()
    found = twins.current[0].finish()
    looks = [each.partition("; looks like ")[2] for each in found.mismatches]
    return {
        "same": error(checked, without) == 0.0,
        "found": found.mismatches,
        "hints": sorted({fix for look in looks if look for fix in look.split(" or ")}),
        **found.totals,
    }


for argument in sys.argv[1:]:
    given = json.loads(argument) if argument.startswith("{") else dict(CASES[argument].options)
    print(json.dumps(measure(given)), flush=True)
