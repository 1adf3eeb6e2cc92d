"""``fp8-weight-transposes``, ``cached-weight-lifetime`` and ``state-after-evaluation`` on the simulator.

Programs that are no cases of ``verify``, one after another in one process.
"""

from __future__ import annotations

from typing import Any

import pytest

from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.verify.cases import CASES, Case
from tests.support import published
from tests.support.child import measured, on_simulator, simulate

TRANSPOSES, CACHED, STATE = "fp8-weight-transposes", "cached-weight-lifetime", "state-after-evaluation"
STATE_ALONE = f"{STATE},fp8-state-at-replay,nested-autocast"
"""With what it requires."""
FIXES = TRANSPOSES, CACHED, STATE
EVERYTHING_ELSE = ",".join(sorted(set(CATALOGUE) - set(FIXES)))
NEEDED = published.te("installed").needed
STEPS = ("step",) * 3
SHARED = CASES["inference-and-training"].options

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "master-mlp": (
        TRANSPOSES,
        {"modules": ("layernorm_mlp",), "recipe": "current", "fp8_params": True, "optimizer": "master weights"},
    ),
    "master-ops": (
        TRANSPOSES,
        {"modules": ("operation",), "recipe": "current", "fp8_params": True, "optimizer": "master weights"},
    ),
    "fp8-params-operation": (
        STATE,
        {
            "modules": ("operation",),
            "recipe": "delayed",
            "fp8_params": True,
            "events": ("step", "evaluate_in_bf16", "step", "save", "step", "save"),
        },
    ),
    "no-grad-load": (
        TRANSPOSES,
        {
            "modules": ("layernorm_linear",),
            "recipe": "delayed",
            "fp8_params": True,
            "built_without_grad": True,
            "events": ("step", "save", "step", "load", "eager_step", "step"),
        },
    ),
    "operation-by-forward": (
        STATE,
        {
            "modules": ("CallsOperation",),
            "recipe": "current",
            "other": "delayed",
            "events": ("step", "save", "evaluate_in_bf16", "step", "save", "evaluate_in_other", "step", "save"),
        },
    ),
    "shared-experts": (CACHED, {**SHARED, "modules": ("grouped_linear",), "recipe": "delayed"}),
    "shared-mlp": (CACHED, {**SHARED, "modules": ("layernorm_mlp",), "order": (1, -1) * 2}),
}
"""Programs that are not in ``verify``, with the fix that they are about."""

WITHOUT = {
    "master-mlp": ("dgrads", 0.1),
    "master-ops": ("dgrads", 0.5),
    "no-grad-load": ("dgrads", 0.9),
    "operation-by-forward": ("FP8 state", 0.9),
    "shared-experts": ("outputs", 0.9),
    "shared-mlp": ("outputs", 0.9),
}
"""What is wrong without the fixes, and by how much at least."""

CASE = [
    Case(name, (fix,), "programs:compare", {"events": STEPS, "takes_grads": True, **options})
    for name, (fix, options) in OTHERS.items()
]


@pytest.fixture(scope="module")
def fixed() -> dict[str, Any]:
    return measured(*CASE)


@pytest.mark.parametrize("name", OTHERS)
def test_replay_is_eager_bit_for_bit(fixed: dict[str, Any], name: str) -> None:
    assert (fixed[name]["outcome"], fixed[name].get("error")) == ("measured", 0.0), fixed[name]


@pytest.fixture(scope="module")
def without() -> dict[str, Any]:
    return measured(*(case for case in CASE if case.name in WITHOUT), TE_GRAPH_FIXES=EVERYTHING_ELSE)


@pytest.mark.skipif(not set(FIXES) & NEEDED, reason="this TE has the corrected code")
@pytest.mark.parametrize("name", WITHOUT)
def test_without_the_fixes_it_is_not(without: dict[str, Any], name: str) -> None:
    kind, least = WITHOUT[name]
    assert max(without[name]["measures"]["errors"][kind]) > least


OWNERS = """
import gc, weakref, te_graph_fixes, torch
import transformer_engine.pytorch as te
from te_graph_fixes.verify.driver.events import Training
from te_graph_fixes.verify.driver.program import Program
from te_graph_fixes.verify.driver.setting import use

options = {"inference": "first", "not_captured": (0,), "events": ("infer",)}
use(Program(recipe="delayed", other="current", weights="cached", **options))
training = Training(graphed=True)
(module,) = training.layers
weight = module._fp8_workspaces["weight"]
states = [module.fp8_meta[name] for name in ("scaling_fwd", "scaling_bwd")]
held = [weight._data, weight._scale_inv, *(state.scale for state in states), *(state.amax_history for state in states)]
held = [weakref.ref(tensor) for tensor in held]
training.event = "an evaluation"
training.evaluation("current")
del weight, states
te.quantization.FP8GlobalStateManager.reset()  # forgets the scales that it updated
gc.collect()
print([reference() is not None for reference in held])
"""


def test_a_graph_owns_what_it_reads() -> None:
    assert simulate("-c", OWNERS, TE_GRAPH_FIXES=f"{CACHED},{STATE_ALONE}").splitlines()[-1] == str([True] * 6)
    if {CACHED, STATE} <= NEEDED:
        assert simulate("-c", OWNERS, TE_GRAPH_FIXES="off").splitlines()[-1] == str([False] * 6)


MISUSE = """
import te_graph_fixes
from te_graph_fixes.verify.driver.events import Training
from te_graph_fixes.verify.driver.program import Program
from te_graph_fixes.verify.driver.setting import autocast, random, use

use(Program(recipe="delayed"))
graph = Training(graphed=True).calls[0][0]
with autocast("current"):
    graph(random())
"""


def test_a_replay_in_another_recipe_is_refused() -> None:
    done = on_simulator("-c", MISUSE, TE_GRAPH_FIXES=STATE_ALONE)
    assert done.returncode == 1
    assert "RuntimeError: a graph of Linear was captured with a DelayedScalingRecipeState" in done.stderr
