"""Find programs that the fixes make worse: eager training changes, or correct graphs fail, differ or cost more.

On the simulator, the costs are the numbers of kernels, copies and module forwards, and the memory of graphs. On a GPU,
only values are compared.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import transformer_engine.pytorch as te
from torch.utils._python_dispatch import TorchDispatchMode

from tests import simulator
from tests.simulator import graph
from tests.verify.driver import setting
from tests.verify.driver.comparison import differences
from tests.verify.driver.events import OF_GRAPHS, train
from tests.verify.driver.program import Program

from .digests import digest, said

aten = torch.ops.aten
COPIES = {aten.copy_, aten.clone, aten._to_copy}


class Costs(TorchDispatchMode):
    """A mode that counts ``launches``, ``copies`` (which are also launches), and ``forwards`` of modules.

    A launch is an operation that writes values. It is counted when it runs eagerly or in a replay. Operations in
    `make_graphed_callables`, for example in the warmup, are counted separately from operations of the training.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = collections.Counter[str]()
        self._part = "training"

    def __enter__(self) -> Costs:
        graph.on_launch = self._count_kernel
        self._hook = torch.nn.modules.module.register_module_forward_pre_hook(self._count_forward)
        self._captures = mock.patch.object(te, "make_graphed_callables", self._capture(te.make_graphed_callables))
        self._captures.start()
        super().__enter__()
        return self

    def _capture(self, function: Any) -> Any:
        def capture(*args: Any, **kwargs: Any) -> Any:
            self._part = "capture"
            try:
                return function(*args, **kwargs)
            finally:
                self._part = "training"

        return capture

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._captures.stop()
        self._hook.remove()
        graph.on_launch = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (func.is_view or func.overloadpacket in graph.ALLOCATIONS):
            self._count_kernel(func)
        return result

    def _count_kernel(self, kernel: Any) -> None:
        self._add("launches")
        if getattr(kernel, "overloadpacket", None) in COPIES:
            self._add("copies")

    def _count_forward(self, *_: Any) -> None:
        self._add("forwards")

    def _add(self, name: str) -> None:
        self.counts[f"{name} of the {self._part}"] += 1


@contextlib.contextmanager
def counted_costs() -> Iterator[collections.Counter[str]]:
    """Yield a counter that counts the costs of the ``with`` block. On a GPU, it counts nothing."""
    costs = Costs()
    with costs if simulator.installed() else contextlib.nullcontext():
        yield costs.counts


def measure(program: Program, graphs: bool) -> dict[str, Any]:
    """Train a program eagerly and, if ``graphs`` is true, through graphs.

    Return a dict with the verdict, the eager run's digest and costs (unless it fails) and, if graphs are correct, their
    costs.
    """
    setting.use(program)
    try:
        with counted_costs() as eager_costs:
            eager = train(graphed=False)
    except Exception as error:
        return {"verdict": "not eager", "why": said(error)}
    result: dict[str, Any] = {"verdict": "eager", "eager": digest(eager), "eager costs": eager_costs}
    if not graphs:
        return result
    try:
        with counted_costs() as graph_costs:
            found = train(graphed=True)
    except Exception as error:
        return result | {"verdict": "raises", "why": said(error)}
    if wrong := differences(found, eager):
        return result | {"verdict": "wrong", "why": str(wrong)}
    if OF_GRAPHS in found:
        graph_costs["memory"] = int(found[OF_GRAPHS][0][1])
    return result | {"verdict": "equal", "graph costs": graph_costs}


def regressions(alone: dict[str, Any], fixed: dict[str, Any]) -> list[str]:
    """Return lines (or []) about changed eager training and, if TE alone is correct, about worse or costlier graphs."""
    if alone.get("eager") != fixed.get("eager"):
        return ["eager: other values or another error"]
    worse = []
    for name in sorted({*alone.get("eager costs", ()), *fixed.get("eager costs", ())}):
        old, new = (each["eager costs"].get(name, 0) for each in (alone, fixed))
        if new != old:
            worse.append(f"eager {name}: {old} with TE alone, {new} with the fixes")
    if alone["verdict"] != "equal":
        return worse
    if fixed["verdict"] != "equal":
        return [*worse, f"graphs: {fixed['verdict']} with the fixes, {fixed['why']}"]
    for name in sorted({*alone["graph costs"], *fixed["graph costs"]}):
        old, new = (each["graph costs"].get(name, 0) for each in (alone, fixed))
        if new > old:
            worse.append(f"cost: {name}: {old} with TE alone, {new} with the fixes")
    return worse
