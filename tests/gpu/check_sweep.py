"""Train with and without ``te_graph_fixes.check``: what it finds, whether it leaves the training alone, what it costs.

    te-graph-fixes run -- python tests/gpu/check_sweep.py          # correct graphs: nothing may be found
    te-graph-fixes run -- python tests/gpu/check_sweep.py 1/3      # every third training, from the second on
    TE_GRAPH_FIXES=off python tests/gpu/check_sweep.py cases       # each case of `verify`, without fixes: what is found

Modules, recipes, fused and delayed wgrads and orders; a TransformerLayer with dropout, recomputed or not, and torch
code in a module. Prints a line for each training that differs or in which something is found, and a summary.
"""

from __future__ import annotations

import itertools
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

import te_graph_fixes
from te_graph_fixes.checking import twins
from te_graph_fixes.verify.cases import CASES
from te_graph_fixes.verify.driver.events import train
from te_graph_fixes.verify.driver.program import Program, Skipped
from te_graph_fixes.verify.driver.setting import plain_recipe, use

INTERLEAVED = (1, 2, 1, 2, -2, 1, 2, -1, -2, 1, 2, -1, -2, -1, -2, -1)
ORDERS: tuple[tuple[Any, bool, bool], ...] = (
    ((), False, True),
    ((), False, False),
    ((1, -1) * 3, True, False),
    ((1, 2, -2, 1, 2, -2, -1, -1), True, True),
    (INTERLEAVED, True, True),
)
"""An order, whether buffers are reused, and whether modules mark first microbatches."""
STEPS = {"microbatches": 3, "drops_dummies": True, "clean_start": True, "events": ("step",) * 4}
COMPUTED = ("outputs", "dgrads", "wgrads", "parameters", "FP8 state", "RNG state")


def programs() -> Iterator[dict[str, Any]]:
    modules = ("linear", "layernorm_linear", "layernorm_mlp", "grouped_linear")
    recipes = ("bf16", "delayed", "current", "block")
    for module, recipe, fused, delay in itertools.product(modules, recipes, (True, False), (False, True)):
        for order, reuse, mark_first in ORDERS:
            if not (delay and not order and mark_first):
                weights = "plain" if not mark_first else "marked" if recipe == "bf16" else "cached"
                options = {"modules": (module,) * max(order or (1,)), "recipe": recipe, "fused": fused, "delay": delay}
                yield STEPS | options | {"order": order, "reuse": reuse, "weights": weights, "bias": True, "fit": True}
    fused = STEPS | {"fused": True, "weights": "cached"}
    for recipe in ("current", "delayed"):
        yield fused | {"fp8_params": True, "recipe": recipe}
        yield fused | {"weights": "marked", "recipe": recipe}
        yield fused | {"first": "eager", "recipe": recipe}
    yield fused | {"modules": ("uneven_experts",), "weights": "marked"}


def values(options: dict[str, Any]) -> list[torch.Tensor]:
    use(Program(**options))
    seen = train(graphed=True)
    return [x for name, found in seen.items() if name.partition(": ")[2] in COMPUTED for x in found if x is not None]


def layer(recipe_name: str, recompute: bool = False, dropout: float = 0.1) -> list[torch.Tensor]:
    """Four steps of two microbatches of a TransformerLayer, graphed as one."""
    recipe = plain_recipe(recipe_name)
    FP8GlobalStateManager.reset()
    torch.manual_seed(0)
    torch.cuda.manual_seed(0)
    made: Any = te.TransformerLayer(
        256, 512, 4, hidden_dropout=dropout, attention_dropout=dropout, params_dtype=torch.bfloat16, device="cuda"
    )
    module: Any = Recomputed(made) if recompute else made
    sample = torch.randn(128, 2, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    graphed = te.make_graphed_callables(module, (sample,), enabled=recipe is not None, recipe=recipe)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    found = []
    for _ in range(4):
        for _ in range(2):
            x = torch.randn_like(sample).requires_grad_()
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                out = graphed(x)
            out.square().mean().backward()
            found += [out.detach().clone(), x.grad.clone()]
        found += [parameter.grad.clone() for parameter in module.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach().clone() for p in module.parameters()), torch.cuda.get_rng_state()]


class Recomputed(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return te.checkpoint(self.module, x)


def attempt(work: Callable[[], list[torch.Tensor]]) -> tuple[list[torch.Tensor] | str, float]:
    start = time.perf_counter()
    try:
        found: list[torch.Tensor] | str = work()
    except Skipped:
        raise
    except Exception as error:
        found = f"{type(error).__name__}: {error}"[:120]
    torch.cuda.synchronize()
    return found, time.perf_counter() - start


def compare(name: str, work: Callable[[], list[torch.Tensor]], totals: dict[str, float]) -> None:
    """Run ``work`` without and with the check, which has to leave it alone."""
    try:
        without, seconds = attempt(work)
        te_graph_fixes.check(3)
        checked, checked_seconds = attempt(work)
    except Skipped:
        totals["skipped"] += 1
        return
    findings = twins.current[0].finish()
    both = isinstance(without, list) and isinstance(checked, list)
    same = without == checked if not both else all(map(same_bits, without, checked))
    totals["trainings"] += 1
    totals["tensors"] += findings.totals["tensors"]
    totals["not reproducible"] += findings.totals["noisy"]
    totals["left out"] += findings.totals["left out"]
    totals["found"] += bool(findings.mismatches)
    totals["changed"] += not same
    totals["seconds"] += seconds
    totals["seconds checked"] += checked_seconds
    if findings.mismatches or not same or isinstance(without, str):
        print(f"{name}: {'the same training' if same else 'ANOTHER TRAINING'}", without if not both else "", flush=True)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def trainings() -> Iterator[tuple[str, Callable[[], list[torch.Tensor]]]]:
    """Those that the command line asks for, with their names."""
    if sys.argv[1:] == ["cases"]:
        for case in CASES.values():
            if case.function == "programs:compare":
                yield case.name, partial(values, dict(case.options))
        return
    for options in programs():
        yield str(options), partial(values, options)
    for recipe in ("bf16", "delayed", "current"):
        for recompute in (False, True):
            yield f"layer {recipe} {recompute=}", partial(layer, recipe, recompute)


def main() -> None:
    names = ("trainings", "tensors", "not reproducible", "left out", "found", "changed", "skipped", "seconds")
    totals = dict.fromkeys((*names, "seconds checked"), 0.0)
    part, _, parts = (sys.argv[1] if "/" in sys.argv[-1] else "0/1").partition("/")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # from `timeout`
    try:
        for name, work in itertools.islice(trainings(), int(part), None, int(parts)):
            compare(name, work, totals)
    finally:
        print(te_graph_fixes.report().te_version, {name: round(value, 1) for name, value in totals.items()})


if __name__ == "__main__":
    main()
