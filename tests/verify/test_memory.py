"""Test on the simulator that no fix increases the peak memory of captures, and that captures restore ``main_grad``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from te_graph_fixes.fixes import CATALOGUE
from tests.support import published
from tests.support.child import measured, run_program
from tests.support.megatron_orders import interleaved
from tests.verify.cases import Case

pytestmark = pytest.mark.te

LIMIT = 1.01
EXPERTS: dict[str, Any] = {"modules": ("grouped_linear",) * 2, "hidden": 256, "fused": True, "weights": "cached"}
PROGRAMS: dict[str, dict[str, Any]] = {
    "experts": {**EXPERTS, "weights": "marked"},
    "experts together": {**EXPERTS, "weights": "marked", "together": True},
    "experts in order": {**EXPERTS, "weights": "marked", "order": (1, 1, -1, -1), "reuse": True},
    "experts, current": {**EXPERTS, "recipe": "current"},
    "experts, delayed": {**EXPERTS, "recipe": "delayed"},
    "dense, interleaved": {
        "modules": ("layernorm_mlp",) * 4,
        "hidden": 256,
        "fused": True,
        "order": tuple(interleaved(4, 1, 4, 16)),
        "reuse": True,
    },
}
NEEDED = sorted(published.te("installed").needed)


def peaks(setting: str) -> dict[str, int]:
    """Run the `PROGRAMS`. Return the highest memory peak of a capture in bytes, by program."""
    case = Case("peaks", (), "memory:compare", {"programs": PROGRAMS})
    found: dict[str, int] = measured(case, TE_GRAPH_FIXES=setting)["peaks"]["measures"]["peaks"]
    return found


@pytest.fixture(scope="module")
def without() -> dict[str, int]:
    return peaks("off")


@pytest.mark.full
def test_all_fixes_together_add_nothing_to_the_peak(without: dict[str, int]) -> None:
    found = peaks("on")
    assert {name: found[name] / peak for name, peak in without.items() if found[name] > LIMIT * peak} == {}


def required(fix: str) -> set[str]:
    return {fix}.union(*map(required, CATALOGUE[fix].requires))


@pytest.mark.slow
@pytest.mark.parametrize("fix", NEEDED)
def test_a_fix_adds_nothing_to_the_peak(without: dict[str, int], fix: str) -> None:
    found = peaks(",".join(sorted(required(fix) & {*NEEDED})))
    assert {name: found[name] / peak for name, peak in without.items() if found[name] > LIMIT * peak} == {}


MAIN_GRADS = """
class Layer(te.Linear):
    fails = False

    def forward(self, x):
        out = super().forward(x)
        if self.fails:
            out.register_hook(self.fail)
        return out

    def fail(self, grad):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 2:
            raise ZeroDivisionError

options = {"bias": False, "params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": True}

def capture(main_grads, fails=False, training=True):
    layers = [Layer(32, 32, **options).train(training) for _ in main_grads]
    for layer, main_grad in zip(layers, main_grads):
        layer.weight.main_grad, layer.weight.grad_added_to_main_grad = main_grad, False
    layers[-1].fails = fails
    with contextlib.suppress(ZeroDivisionError):
        te.make_graphed_callables(tuple(layers), tuple((random(16, 32),) for _ in layers))
    assert all(layer.weight.main_grad is each for layer, each in zip(layers, main_grads))

def numbers(*shape, dtype=torch.float32):
    return random(*shape, grad=False, dtype=dtype)

buffer = numbers(3 * 32 * 32 + 100)
zeros, one = torch.zeros(32, 32, device="cuda"), numbers(32, 32)
programs = {
    "zeros": ([zeros, torch.zeros_like(zeros)], {}),
    "NaN": ([numbers(32, 32).fill_(torch.nan)], {}),
    "views of a buffer": ([buffer[n * 1024 + 50:][:1024].view(32, 32) for n in range(3)], {}),
    "shared": ([one, one], {}),
    "of two dtypes": ([numbers(32, 32, dtype=torch.bfloat16), numbers(32, 32)], {}),
    "without training": ([numbers(32, 32)], {"training": False}),
    "a warmup that fails": ([numbers(32, 32), numbers(32, 32)], {"fails": True}),
}
changed = []
for name, (main_grads, given) in programs.items():
    everything = [*main_grads, buffer]
    before = [each.clone() for each in everything]
    capture(main_grads, **given)
    if not all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(before, everything)):
        changed.append(name)
print(json.dumps(changed))
"""


def changed_main_grads(setting: str) -> list[str]:
    """Return the names of the programs in which a capture changes a ``main_grad`` or the memory next to it."""
    return json.loads(run_program(MAIN_GRADS, TE_GRAPH_FIXES=setting))


def test_warmup_leaves_main_grads_as_they_were() -> None:
    assert changed_main_grads("on") == []


def test_without_the_fix_warmup_changes_main_grads() -> None:
    found = changed_main_grads("off")
    assert {"zeros", "views of a buffer", "shared", "of two dtypes", "a warmup that fails"} <= set(found)
    assert "without training" not in found


@pytest.fixture(scope="module")
def te_219() -> str:
    return str(published.source("2.19.0"))


def test_memory_of_microbatches_shows_what_te_219_keeps(te_219: str) -> None:
    name = "memory-of-microbatches"
    without, with_fixes = (measured(name, path=te_219, TE_GRAPH_FIXES=each)[name] for each in ("off", "on"))
    assert without["error"] > 0.1
    assert with_fixes["error"] == 0.0
