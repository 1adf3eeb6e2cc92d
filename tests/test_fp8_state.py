"""``fp8-weight-transposes``, ``cached-weight-lifetime`` and ``state-after-evaluation`` on the simulator.

Programs of ``te_graph_fixes/verify/evaluation.py`` that are no cases of ``verify``, one after another in one process.
"""

from __future__ import annotations

from typing import Any

import pytest

from te_graph_fixes.fix import APPLICABLE
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.source import Source
from te_graph_fixes.verdicts import verdicts
from te_graph_fixes.verify.cases import CASES, Case
from tests.child import measured, on_simulator, simulate

TRANSPOSES, CACHED, STATE = "fp8-weight-transposes", "cached-weight-lifetime", "state-after-evaluation"
STATE_ALONE = f"{STATE},fp8-state-at-replay"
"""With what it requires."""
FIXES = TRANSPOSES, CACHED, STATE
EVERYTHING_ELSE = ",".join(sorted(set(CATALOGUE) - set(FIXES)))
NEEDED = {fix for fix, verdict in verdicts(Source.installed()).items() if verdict.verdict == APPLICABLE}
STEPS = ("first", "later", "update") * 2 + ("first", "later")
SHARED = tuple(CASES["inference-and-training"].options["events"])

OTHERS = {
    "master-mlp": (TRANSPOSES, STEPS, {"module": "LayerNormMLP", "fp8_params": True, "update": "master"}),
    "master-ops": (TRANSPOSES, STEPS, {"module": "ops.Linear", "fp8_params": True, "update": "master"}),
    "fp8-params-operation": (
        *(STATE, ("first", "update", "bf16", "first", "update", "save", "first", "update", "save")),
        {"module": "ops.Linear", "recipe": "fp8-delayed", "fp8_params": True, "alone": True},
    ),
    "no-grad-load": (
        *(TRANSPOSES, (*STEPS, "update", "eager-first", "first")),
        {"module": "LayerNormLinear", "recipe": "fp8-delayed", "fp8_params": True, "no_grad": True, "update": "load"},
    ),
    "operation-by-forward": (
        *(STATE, ("first", "update", "save", "bf16", "first", "update", "save", "other", "first", "save")),
        {"module": "ops.Linear", "recipe": "fp8-current", "other": "fp8-delayed", "alone": True, "by_forward": True},
    ),
    "shared-experts": (
        *(CACHED, SHARED),
        {"module": "GroupedLinear", "recipe": "fp8-delayed", "cache": True, "captures": ["infer", "train"]},
    ),
    "shared-mlp": (
        *(CACHED, SHARED),
        {"module": "LayerNormMLP", "cache": True, "pipelined": True, "captures": ["infer", "train"]},
    ),
}
"""Programs that are not in ``verify``: the fix, the events and the options."""

WITHOUT = {
    "master-mlp": ("first", 0.9),
    "master-ops": ("first", 0.9),
    "operation-by-forward": ("save", 0.9),
    "shared-experts": ("infer-later", 0.9),
    "shared-mlp": ("infer-later", 0.9),
}
"""The event that is wrong without the fixes, and by how much at least."""

CASE = [
    Case(name, (fix,), "evaluation:compare", {"events": events, **options})
    for name, (fix, events, options) in OTHERS.items()
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
    event, least = WITHOUT[name]
    assert max(without[name]["measures"]["errors"][event]) > least


OWNERS = """
import gc, weakref, torch, te_graph_fixes
import transformer_engine.pytorch as te
from te_graph_fixes.verify.evaluation import Program, capture, infer, make_module
from te_graph_fixes.verify.training import make_recipe

recipes = {name: make_recipe(name) for name in ("fp8-delayed", "fp8-current")}
recipe = recipes["fp8-delayed"]
program = Program((), recipe="fp8-delayed", cache=True)
module = make_module(program, recipe, 1)
graph = capture(program, module, recipe, "infer")["infer-first"]
weight = module._fp8_workspaces["weight"]
states = [module.fp8_meta[name] for name in ("scaling_fwd", "scaling_bwd")]
held = [weight._data, weight._scale_inv, *(state.scale for state in states), *(state.amax_history for state in states)]
held = [weakref.ref(tensor) for tensor in held]
forward = type(module).forward
x = torch.randn(256, 128, dtype=torch.bfloat16, device="cuda")
infer(module, lambda x: forward(module, x, is_first_microbatch=True), x, recipes["fp8-current"])
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
import torch, te_graph_fixes
import transformer_engine.pytorch as te
from te_graph_fixes.verify.evaluation import Program, capture, make_module
from te_graph_fixes.verify.training import make_recipe

delayed, current = map(make_recipe, ("fp8-delayed", "fp8-current"))
program = Program(())
module = make_module(program, delayed, 1)
graph = capture(program, module, delayed, "train")["first"]
with te.autocast(enabled=True, recipe=current):
    graph(torch.randn(256, 128, dtype=torch.bfloat16, device="cuda"))
"""


def test_a_replay_in_another_recipe_is_refused() -> None:
    done = on_simulator("-c", MISUSE, TE_GRAPH_FIXES=STATE_ALONE)
    assert done.returncode == 1
    assert "RuntimeError: a graph of Linear was captured with a DelayedScalingRecipeState" in done.stderr
