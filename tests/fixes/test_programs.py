"""Test cases of `verify` and the programs of `tests.programs` on the simulator, with and without the fixes."""

from __future__ import annotations

import itertools
import json

import pytest

from tests.support import published
from tests.support.child import ROOT, gpu, measured, simulate
from tests.support.legal_orders import NAMED, random_orders
from tests.verify.cases import CASES, SIMULATED, Case

pytestmark = pytest.mark.te

ALSO = (
    *("nested-modules", "self-distillation", "plain-torch-first", "other-rng-states"),
    *("forward-method", "own-autocast", "checkpoint", "operations-in-bf16"),
)
"""Cases of `verify` that are wrong if only their fix is disabled."""
PROGRAMS = {name: CASES[name] for name in ALSO} | SIMULATED
MODULES = [path.stem for path in sorted((ROOT / "tests" / "programs").glob("[!_]*.py"))]
"""The names of the modules in `tests.programs`."""
QUICK = {case.fixes: case for case in reversed(PROGRAMS.values())}.values()
"""One program for each set of fixes."""


@pytest.mark.parametrize("simulated", ["hopper", "blackwell"])
def test_programs_are_as_without_graphs(simulated: str) -> None:
    programs = {name: program for name, program in PROGRAMS.items() if gpu(program) == simulated}
    results = measured(*programs.values(), TE_SIMULATOR_GPU=simulated)
    assert {name: line.get("error", line) for name, line in results.items()} == dict.fromkeys(programs, 0.0)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(each, id=each.name, marks=[] if each in QUICK else [pytest.mark.full])
        for each in PROGRAMS.values()
        if each.fixes
    ],
)
def test_without_the_fixes_they_differ(program: Case) -> None:
    for fix in program.fixes:
        published.te("installed").require(fix)
    disabled = ",".join(program.fixes)
    result = measured(program, TE_GRAPH_FIXES_DISABLE=disabled, TE_SIMULATOR_GPU=gpu(program))[program.name]
    assert result["outcome"] == "failed" or result["error"] > 0.05, result


@pytest.mark.parametrize("module", ["layernorm_linear", pytest.param("grouped_linear", marks=pytest.mark.full)])
def test_orders_give_what_eager_gives(module: str) -> None:
    """Graphs in every order must equal eager training. All modules delay wgrads, which needs `backward-dw-order`."""
    orders = [order for order in [*NAMED.values(), *random_orders(4, 4)] if len(order) < 30]
    options = {"delay": True, "bias": True, "takes_grads": True}
    cases = []
    for order, reuse in itertools.product(orders, (False, True)):
        program = {"modules": (module,) * int(max(order)), "order": order, "reuse": reuse, **options}
        cases.append(Case(f"{order}, {reuse}", (), "programs:compare", program))
    assert [case for case, line in measured(*cases).items() if line["error"]] == []


def unexpected(module: str, switch: str) -> list[str]:
    """Run a module of `tests.programs`. Return a line for each program with an unexpected outcome, or []."""
    outcomes = json.loads(simulate("-m", "tests.programs", module, TE_GRAPH_FIXES=switch))
    assert outcomes
    return [
        f"{name}: {found}"
        for name, (found, expected) in outcomes.items()
        if found != expected and (expected == "equal" or expected not in found)
    ]


@pytest.mark.parametrize("module", MODULES)
def test_programs_have_the_expected_outcomes(module: str) -> None:
    assert unexpected(module, "on") == []


@pytest.mark.parametrize("module", MODULES)
def test_programs_have_other_outcomes_without_the_fixes(module: str) -> None:
    assert unexpected(module, "off")
