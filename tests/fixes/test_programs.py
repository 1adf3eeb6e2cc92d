"""Programs of `verify`'s driver that are no cases of it, on the simulator, and the fixes that they and cases need."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support import published
from tests.support.child import measured
from tests.support.legal_orders import NAMED, random_orders
from tests.verify.cases import BLACKWELL_RECIPES, CASES, Case

pytestmark = pytest.mark.te

STEPS = ("step",) * 3
SHARED = CASES["inference-and-training"].options
EVALUATED = ("step", "save", "evaluate_in_bf16", "step", "save", "evaluate_in_other", "step", "save")
MASTER = {"recipe": "current", "fp8_params": True, "optimizer": "master weights"}

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
    "own-autocast-and-validations": {  # an illegal access in the backward after one, on Blackwell
        "modules": ("OwnAutocast",),
        "recipe": "nvfp4",
        "other": "mxfp8",
        "weights": "cached",
        "hidden": 128,
        "events": ("step", "evaluate", "step", "evaluate", "step"),
    },
    "checkpoints-of-graphs-and-eager": {
        "modules": ("Block", "linear", "linear"),
        "not_captured": (1,),
        "checkpoints": ("te",) * 3,
    },
    "master-mlp": {**MASTER, "modules": ("layernorm_mlp",)},
    "master-operation": {**MASTER, "modules": ("operation",)},
    "fp8-params-operation": {
        "modules": ("operation",),
        "fp8_params": True,
        "events": ("step", "evaluate_in_bf16", "step", "save", "step", "save"),
    },
    "no-grad-load": {
        "modules": ("layernorm_linear",),
        "fp8_params": True,
        "built_without_grad": True,
        "events": ("step", "save", "step", "load", "eager_step", "step"),
    },
    "operation-by-forward": {
        "modules": ("CallsOperations",),
        "recipe": "current",
        "other": "delayed",
        "events": EVALUATED,
    },
    "shared-experts": {**SHARED, "modules": ("grouped_linear",), "recipe": "delayed"},
    "shared-mlp": {**SHARED, "modules": ("layernorm_mlp",), "order": (1, -1) * 2},
    "spoiled-capture": {"events": ("failed_capture 5 6", "step")},
    "other-needs-of-gradients": {
        "modules": ("linear", "linear"),
        "recipe": "bf16",
        "order": (1, 1, -1, 1, -1, -1),
        "layers_as_chunks": True,
        "reuse": True,
        "input_grads": False,
        "events": ("step",),
    },
    "none-output-and-reuse": {
        "modules": ("WithNone", "linear"),
        "recipe": "bf16",
        "order": (1, 1, -1, -1),
        "reuse": True,
        "events": ("step",),
    },
}

SPOILT = {
    "nested-autocast": ("nested-modules", "subclass-inside", "enabled-by-module", "bf16-inside"),
    "backward-amax-reduction": ("self-distillation", "plain-torch-first"),
    "rng-states-at-replay": ("other-rng-states",),
    "fp8-state-at-replay": (
        "forward-method",
        "own-autocast",
        "checkpoint",
        "operations-in-bf16",
        "eager-before-replay",
    ),
    "fp8-state-at-replay,cached-weight-lifetime": ("own-autocast-and-validations",),
    "fp8-weight-transposes": ("master-mlp", "master-operation", "no-grad-load"),
    "state-after-evaluation": ("fp8-params-operation", "operation-by-forward"),
    "cached-weight-lifetime": ("shared-experts", "shared-mlp"),
    "failed-capture-state": ("spoiled-capture",),
    "static-buffer-reuse": ("other-needs-of-gradients",),
}
"""By fixes that are left out, programs that are wrong then."""

PROGRAMS = {name: CASES[name] for names in SPOILT.values() for name in names if name in CASES} | {
    name: Case(name, (), "programs:compare", {"recipe": "delayed", "events": STEPS, "takes_grads": True, **options})
    for name, options in OTHERS.items()
}


def gpu(program: Case) -> str:
    return "blackwell" if program.options["recipe"] in BLACKWELL_RECIPES else "hopper"


@pytest.mark.parametrize("simulated", ["hopper", "blackwell"])
def test_programs_are_as_without_graphs(simulated: str) -> None:
    programs = {name: program for name, program in PROGRAMS.items() if gpu(program) == simulated}
    results = measured(*programs.values(), TE_SIMULATOR_GPU=simulated)
    assert {name: line.get("error", line) for name, line in results.items()} == dict.fromkeys(programs, 0.0)


@pytest.mark.parametrize(
    ("fixes", "name"),
    [
        pytest.param(fixes, name, marks=[pytest.mark.full] * (name != names[0]))
        for fixes, names in SPOILT.items()
        for name in names
    ],
)
def test_without_the_fixes_they_differ(fixes: str, name: str) -> None:
    for fix in fixes.split(","):
        published.te("installed").require(fix)
    program = PROGRAMS[name]
    result = measured(program, TE_GRAPH_FIXES_DISABLE=fixes, TE_SIMULATOR_GPU=gpu(program))[name]
    assert result["outcome"] == "failed" or result["error"] > 0.05, result


@pytest.mark.parametrize("module", ["layernorm_linear", pytest.param("grouped_linear", marks=pytest.mark.full)])
def test_orders_give_what_eager_gives(module: str) -> None:
    """With delayed wgrads: `backward-dw-order`."""
    orders = [order for order in [*NAMED.values(), *random_orders(4, 4)] if len(order) < 30]
    options = {"delay": True, "bias": True, "takes_grads": True}
    cases = [
        Case(
            f"{order}, {reuse}",
            (),
            "programs:compare",
            {"modules": (module,) * int(max(order)), "order": order, "reuse": reuse, **options},
        )
        for order, reuse in itertools.product(orders, (False, True))
    ]
    assert [case for case, line in measured(*cases).items() if line["error"]] == []
