"""TE's modules in graphs that `make_graphed_callables` has not made: `tests/gpu/other_graphs.py` on the simulator.

Without this package they are right; with it they have to be right as well.
"""

from __future__ import annotations

import json

from tests.child import simulate

PROGRAM = "tests/gpu/other_graphs.py"
CASES = (
    "step/Linear/fp8-delayed",
    "microbatches/LayerNormMLP/fp8-delayed/recompute",
)


def test_other_graphs_are_as_without_the_package() -> None:
    found = [
        [json.loads(line) for line in simulate(PROGRAM, "--case", *CASES, TE_GRAPH_FIXES=setting).splitlines()]
        for setting in ("off", "on")
    ]
    for without, fixed in zip(*found, strict=True):
        assert set(fixed["errors"].values()) == {0.0}
        assert fixed == without
