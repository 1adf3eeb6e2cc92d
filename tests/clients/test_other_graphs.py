"""Test that modules of TransformerEngine (TE) are also correct in graphs of other code, with or without TE's graphs.

Run as a program, this module trains eagerly and in graphs, in the ways named by its arguments. For each way, it prints
the differences as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import published
from tests.support.child import run_program, simulate
from tests.verify.driver.program import Program

pytestmark = pytest.mark.te

DELAYED: dict[str, Any] = {"recipe": "delayed", "fused": True, "keeps_grads": True, "weights": "marked"}
PROGRAMS = {
    "a step": Program(modules=("linear",) * 2, **DELAYED),
    "microbatches": Program(modules=("layernorm_mlp", "linear"), checkpoints=("te", "te"), **DELAYED),
    "after TE": Program(modules=("grouped_linear",), **DELAYED),
    "after TE was reset": Program(modules=("linear",) * 2, **{**DELAYED, "recipe": "current"}),
}
"""The program of each way of training."""
if "grouped-linear-skip-flag" not in published.te("installed").needed:
    del PROGRAMS["after TE"]  # the upstream fix is wrong for this program


def test_other_graphs_equal_eager_runs() -> None:
    assert list(map(json.loads, simulate(__file__, *PROGRAMS).splitlines())) == [{}] * len(PROGRAMS)


CAPTURE_OF_OTHERS = """
from transformer_engine.pytorch.graph import set_capture_end, set_capture_start

layer, x = linear(), random()
te.make_graphed_callables(linear(), (x,), enabled=True, recipe=DelayedScaling())
set_capture_start()
graph = torch.cuda.CUDAGraph()
with te.autocast(enabled=True, recipe=DelayedScaling()):
    layer(x)
    with torch.cuda.graph(graph):
        layer(x)
set_capture_end()
scale = weakref.ref(layer.fp8_meta["scaling_fwd"].scale)
del layer, graph
Manager.reset()
gc.collect()
assert scale() is None, gc.get_referrers(scale())
"""


def test_tensors_of_other_captures_are_freed() -> None:
    run_program(CAPTURE_OF_OTHERS)


def main(ways: list[str]) -> None:
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    import te_graph_fixes  # noqa: F401
    from tests.verify.driver import setting
    from tests.verify.driver.comparison import differences
    from tests.verify.driver.training import Training

    class Slot:
        """The static tensors of one microbatch: input, output, and their gradients."""

        def __init__(self) -> None:
            self.x, self.grad = setting.sample().requires_grad_(), setting.sample()
            self.x.grad = torch.zeros_like(self.x)
            self.out = self.x

        @torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
        def load(self, step: int) -> None:
            self.x.copy_(setting.random(3.0**step))
            self.grad.copy_(setting.random(3.0**step))
            self.x.grad.zero_()  # type: ignore[union-attr]

    class Job:
        """A training run whose first step is eager. If ``graphed``, the second step captures graphs."""

        def __init__(self, way: str, graphed: bool) -> None:
            self.way, self.graphed, self.number = way, graphed, 0
            self.training = Training(graphed=False)
            self.graphs: dict[str, Any] = {}
            self.pool = torch.cuda.graph_pool_handle()
            self.slots = [Slot() for _ in range(3)]
            self.besides: Any = None

        def region(self, name: str, function: Callable[[], None]) -> None:
            if not self.graphed or not self.number:
                function()
                return
            if name not in self.graphs:
                self.graphs[name] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graphs[name], pool=self.pool, stream=torch.cuda.current_stream()):
                    function()
            self.graphs[name].replay()

        def microbatch(self, slot: Slot, first: bool) -> None:
            if first:
                self.training.mark_first()
            slot.out = self.training.forward(slot.x, self.training.chunk(0), 0, eager=True)
            slot.out.backward(slot.grad)
            slot.out = slot.out.detach()

        def all_microbatches(self) -> None:
            for number, slot in enumerate(self.slots):
                self.microbatch(slot, number == 0)

        def see(self, slot: Slot) -> None:
            self.training.see("outputs", slot.out)
            self.training.see("dgrads", slot.x.grad)

        def beside(self) -> None:
            """Run two microbatches of another projection.

            In a graphed job, the projection runs in a graph of TE's own, which caches weights and sets the skip flag.
            """
            if self.besides is None:
                self.besides = module = te.Linear(setting.hidden(), setting.hidden(), bias=False, **self.plain)
                if self.graphed:
                    options = {"enabled": True, "cache_quantized_params": True}
                    recipe, leaf = setting.make_recipe(setting.program.recipe), setting.sample().requires_grad_()
                    te.make_graphed_callables(module, (leaf,), recipe=recipe, **options)
                torch.manual_seed(self.number)
            for first in (True, False):
                x = setting.random().requires_grad_()
                with setting.autocast(setting.program.recipe):
                    out = self.besides(x, is_first_microbatch=first)
                out.backward(out.detach())
                self.training.see("outputs", out)
                self.training.see("dgrads", x.grad)

        plain = {"params_dtype": torch.bfloat16, "device": "cuda"}  # noqa: RUF012

        def step(self) -> None:
            match self.way:
                case "microbatches":
                    for number, slot in enumerate((self.slots[0], self.slots[1], self.slots[1])):
                        self.region(
                            f"first {not number}", lambda slot=slot, first=not number: self.microbatch(slot, first)
                        )
                        self.see(slot)
                    return
                case "after TE":
                    self.beside()
                case "after TE was reset" if not self.number:
                    self.beside()
                    FP8GlobalStateManager.reset()
            self.region("step", self.all_microbatches)
            for slot in self.slots:
                self.see(slot)

        @torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
        def update_besides(self) -> None:
            if self.besides is not None and self.besides.weight.grad is not None:
                self.besides.weight -= setting.RATE * self.besides.weight.grad
                self.besides.weight.grad = None

        def train(self) -> dict[str, list[torch.Tensor | None]]:
            for self.number in range(4):
                torch.manual_seed(self.number + 2)
                self.training.event = f"{self.number} step"
                for slot in self.slots:
                    slot.load(self.number)
                self.step()
                self.training.update(setting.RATE)
                self.update_besides()
                self.training.see("parameters", *self.training.parameters)
            return self.training.seen

    for way in ways:
        setting.use(PROGRAMS[way])
        eager = Job(way, graphed=False).train()
        print(json.dumps(differences(Job(way, graphed=True).train(), eager)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
