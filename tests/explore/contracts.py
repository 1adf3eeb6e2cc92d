"""Programs that replay graphs in any sequence, around checkpoints, with parameters replaced: equal, or refused.

`python -m tests.explore --broken` draws them. Each is run eagerly and through graphs, and may be right, or raise what
``replay-contract`` raises; other numbers without a word are a finding.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch.utils.checkpoint import checkpoint

from te_graph_fixes.verify.contract import REFUSED
from te_graph_fixes.verify.driver.comparison import error
from te_graph_fixes.verify.driver.setting import plain_recipe

HIDDEN, TOKENS = 32, 32
CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "": lambda run, x: run(x),
    "te": te.checkpoint,
    "reentrant": lambda run, x: checkpoint(run, x, use_reentrant=True),
    "not reentrant": lambda run, x: checkpoint(lambda x: torch.sin(run(torch.sin(x))), x, use_reentrant=False),
}
CHANGES = ("data", "assign", "main_grad", "unfreeze", "in_place")


@dataclass(frozen=True)
class Drawn:
    """A program: ``capture`` is ``together``, ``apart``, ``in a pool`` or ``order``, with ``graphs`` microbatches."""

    layers: tuple[str, ...]
    capture: str
    graphs: int
    fp8: bool
    fused: bool
    frozen: bool
    retain: bool
    checkpoints: tuple[str, ...]
    events: tuple[tuple[str, int], ...]


def draw(seed: int) -> Drawn:
    """Forwards by a graph, backwards of an open microbatch, evaluations and changes, in any sequence."""
    r = random.Random(seed)
    layers = tuple(r.choice(("Linear", "LayerNormLinear", "LayerNormMLP")) for _ in range(r.randint(1, 3)))
    graphs = r.randint(2, 3)
    events: list[tuple[str, int]] = []
    under_way = forwards = 0
    for _ in range(r.randint(3, 10)):
        if r.random() < 0.12:
            events.append((r.choice(CHANGES), r.randrange(len(layers))))
        elif r.random() < 0.1:
            events.append(("evaluate", r.randrange(graphs)))
        elif under_way and r.random() < 0.6:
            events.append(("backward", r.randrange(under_way) if r.random() < 0.2 else 0))
            under_way -= 1
        else:
            events.append(("forward", r.randrange(graphs) if r.random() < 0.2 else forwards % graphs))
            under_way, forwards = under_way + 1, forwards + 1
    events += [("backward", 0)] * under_way
    return Drawn(
        layers,
        r.choice(("together", "apart", "in a pool", "order", "order")),
        graphs,
        r.random() < 0.3,
        r.random() < 0.4,
        r.random() < 0.2,
        r.random() < 0.2,
        tuple(r.choice(tuple(CHECKPOINTS)) if r.random() < 0.3 else "" for _ in layers),
        tuple(events),
    )


class Training:
    """The modules of a program, graphed or not, and its events."""

    def __init__(self, program: Drawn, graphed: bool) -> None:
        self.program = program
        self.recipe = plain_recipe("current") if program.fp8 else None
        self.modules = [self.made(kind, number) for number, kind in enumerate(program.layers)]
        self.runs: list[list[Any]] = [list(self.modules)] * program.graphs
        if graphed:
            self.capture()

    def made(self, kind: str, seed: int) -> Any:
        torch.manual_seed(seed)
        sizes = (HIDDEN, 2 * HIDDEN) if kind == "LayerNormMLP" else (HIDDEN, HIDDEN)
        fused = self.program.fused
        options = {"params_dtype": torch.bfloat16, "device": "cuda", "fuse_wgrad_accumulation": fused}
        module = getattr(te, kind)(*sizes, **options)
        for parameter in module.parameters() if fused else ():
            parameter.main_grad = torch.zeros(parameter.shape, device="cuda")
            parameter.grad_added_to_main_grad = False
        if self.program.frozen:
            next(module.parameters()).requires_grad_(False)
        return module

    def capture(self) -> None:
        program, modules = self.program, tuple(self.modules)
        options: dict[str, Any] = {"enabled": program.fp8, "recipe": self.recipe, "allow_unused_input": True}
        options["retain_graph_in_backward"] = program.retain

        def sample() -> tuple[torch.Tensor]:
            return (torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda", requires_grad=True),)

        if program.capture == "order":
            order = [1] * program.graphs + [-1] * program.graphs
            samples = [sample() for _ in range(len(modules) * program.graphs)]
            placing = {"_order": order, "_num_layers_per_chunk": [len(modules)]}
            kwargs: list[dict[str, Any]] = [{} for _ in samples]
            placing["_reuse_graph_input_output_buffers"] = True
            found = te.make_graphed_callables(modules, samples, sample_kwargs=kwargs, **placing, **options)
            self.runs = [list(found[len(modules) * k : len(modules) * (k + 1)]) for k in range(program.graphs)]
        elif program.capture == "together":
            te.make_graphed_callables(modules, tuple(sample() for _ in modules), **options)
        else:
            shared = te.graph.graph_pool_handle() if program.capture == "in a pool" else None
            for module in modules:
                te.make_graphed_callables(module, sample(), pool=shared, **options)

    def forward(self, x: torch.Tensor, graph: int) -> Any:
        with te.autocast(enabled=True, recipe=self.recipe) if self.recipe else nullcontext():
            for run, kind in zip(self.runs[graph], self.program.checkpoints, strict=True):
                x = CHECKPOINTS[kind](run, x)
        return x

    def change(self, what: str, module: Any) -> None:
        parameter = [*module.parameters()][-1]
        if what == "data":
            parameter.data = parameter.data * 1.5
        elif what == "assign":
            name = [name for name, _ in module.named_parameters()][-1]
            state = {name: parameter.detach() * 1.5}
            module.load_state_dict(state, strict=False, assign=True)
            new = module.get_parameter(name)
            vars(new).update(
                {k: v for k, v in vars(parameter).items() if k in ("main_grad", "grad_added_to_main_grad")}
            )
        elif what == "main_grad" and self.program.fused:
            for each in module.parameters():
                each.main_grad = each.main_grad.clone()
        elif what == "unfreeze":
            module.requires_grad_(True)
        elif what == "in_place":
            with torch.no_grad():
                parameter.mul_(1.5)

    def run(self) -> Iterator[torch.Tensor]:
        """All that the events compute, and the gradients of the parameters."""
        torch.manual_seed(99)
        under_way = []
        for what, which in self.program.events:
            x, grad = (torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16() for _ in range(2))
            if what == "forward":
                x.requires_grad_()
                under_way.append((x, self.forward(x, which), grad))
                yield under_way[-1][1].detach().clone()
            elif what == "backward":
                x, output, grad = under_way.pop(which)
                output.backward(grad)
                yield x.grad  # type: ignore[misc]
            elif what == "evaluate":
                with torch.no_grad():
                    yield self.forward(x, which).clone()
            else:
                self.change(what, self.modules[which])
        for module in self.modules:
            for parameter in module.parameters():
                grad = None if getattr(parameter, "grad_added_to_main_grad", False) else parameter.grad
                grads = grad, getattr(parameter, "main_grad", None)
                yield from (torch.zeros(1) if each is None else each.clone() for each in grads)


def judge(seed: int) -> dict[str, str]:
    """Draw a program, and run it in this process: its verdict."""
    program = draw(seed)
    given = {"program": str(program)}
    try:
        wanted = list(Training(program, graphed=False).run())
    except Exception as reason:
        return {"verdict": "not eager", "why": str(reason)} | given
    try:
        found = list(Training(program, graphed=True).run())
    except RuntimeError as reason:
        refused = re.search(REFUSED, str(reason))
        return {"verdict": "refused" if refused else "crash", "why": str(reason)} | given
    wrong = error(found, wanted)
    if wrong and error(list(Training(program, graphed=False).run()), wanted):
        return {"verdict": "unstable"} | given
    return {"verdict": "wrong" if wrong else "equal", "why": f"{wrong:.3g}"} | given
