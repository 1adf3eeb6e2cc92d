"""``grad-input-lifetime`` with TransformerEngine (TE) alone, on one GPU or on the simulator.

    python tests/gpu/grad_input_lifetime.py check [HIDDEN TOKENS SCHEDULE ...]  # sent gradients, main_grad, memory
    python tests/gpu/grad_input_lifetime.py memory HIDDEN  # graph memory for PP 4, VPP 2 and 4
    python tests/gpu/grad_input_lifetime.py time           # replay time
    python -m tests.simulator tests/gpu/grad_input_lifetime.py check 64 64

Prints one JSON line for each schedule and setting. A schedule is run as Megatron-Core runs it: the gradient that leaves
a model chunk is sent to the previous stage; Megatron waits for the send once the next model chunk's backward and the
forward that overlaps it have been issued. Here the receiver is as late as that allows: it reads the gradient at the
wait. ``overwritten`` counts the sends whose tensor changed between the send and the wait; ``received_wrong`` those
whose value is not eager's; ``main_grad_error`` is the norm of the difference over the norm of eager's.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.graph import graph_pool_handle

sys.path.insert(0, str(Path(__file__).parents[2]))

import te_graph_fixes
from tests.pipeline_orders import interleaved, layer_wise

ID = "grad-input-lifetime"
ON_SIMULATOR = "tests.simulator" in sys.modules
FUSED = not ON_SIMULATOR


@dataclass
class Schedule:
    """One stage's part of a pipelined step. ``layers`` is the number of layers of each model chunk."""

    stages: int
    stage: int
    layers: list[int]
    microbatches: int
    layer_wise: bool = True
    wgrads: bool = False
    model_order: list[int] = field(init=False)
    order: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.model_order = interleaved(self.stages, self.stage, len(self.layers), self.microbatches)
        self.order = layer_wise(self.model_order, self.layers, self.wgrads)
        if not self.layer_wise:
            self.order = [
                layer
                for entry in self.model_order
                for layer in layer_wise([abs(entry), -abs(entry)], self.layers)
                if (layer > 0) == (entry > 0)
            ]

    @property
    def name(self) -> str:
        kind = ("layers as chunks" + (" with wgrads" if self.wgrads else "")) if self.layer_wise else "model chunks"
        layers = ",".join(map(str, self.layers))
        return f"PP {self.stages} rank {self.stage}, layers {layers}, {self.microbatches} microbatches, {kind}"

    def graph_index(self, layer: int, microbatch: int) -> int:
        """TE's index of the graph of ``layer`` (from 0, over all model chunks) and ``microbatch``."""
        if self.layer_wise:
            return layer * self.microbatches + microbatch
        first = 0
        for size in self.layers:
            if layer < first + size:
                return first * self.microbatches + microbatch * size + layer - first
            first += size
        raise IndexError(layer)


class Layer(torch.nn.Module):
    """Roughly an attention block's buffers: a norm, a projection to three times the width, one back, a residual."""

    def __init__(self, hidden: int, wide: bool, delay_wgrad: bool) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": False, "fuse_wgrad_accumulation": FUSED, "params_dtype": torch.bfloat16}
        options |= {"device": "cuda", "delay_wgrad_compute": delay_wgrad}
        self.wide = wide
        self.up = te.LayerNormLinear(hidden, 3 * hidden, **options) if wide else None
        self.down = te.Linear(hidden, hidden, **options)
        self.delays_wgrad = delay_wgrad

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.up is None:
            return self.down(x)
        q, k, v = self.up(x).chunk(3, dim=-1)
        return x + self.down(torch.sigmoid(q * k) * v)

    def backward_dw(self) -> None:
        for module in (self.down, self.up):
            if module is not None:
                module.backward_dw()


@dataclass
class Stage:
    """The layers of one stage, and what it receives from the others."""

    schedule: Schedule
    hidden: int
    tokens: int
    wide: bool = False

    def __post_init__(self) -> None:
        torch.manual_seed(1)
        self.layers = [Layer(self.hidden, self.wide, self.schedule.wgrads) for _ in range(sum(self.schedule.layers))]
        for layer in self.layers:
            for parameter in layer.parameters():
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
                parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        torch.manual_seed(2)
        shape = (len(self.schedule.layers), self.schedule.microbatches)
        self.inputs = [[self._tensor() for _ in range(shape[1])] for _ in range(shape[0])]
        self.output_grads = [[self._tensor() for _ in range(shape[1])] for _ in range(shape[0])]

    def _tensor(self) -> torch.Tensor:
        return torch.randn(self.tokens, self.hidden, dtype=torch.bfloat16, device="cuda")

    def capture(self) -> tuple[Callable[..., torch.Tensor], ...]:
        schedule = self.schedule
        samples = [(self._tensor().requires_grad_(),) for _ in range(len(self.layers) * schedule.microbatches)]
        self.pool = graph_pool_handle()
        graphs = te.make_graphed_callables(
            tuple(self.layers),
            samples,
            sample_kwargs=[{} for _ in samples],
            num_warmup_iters=1,
            allow_unused_input=True,
            _order=schedule.order if schedule.layer_wise else schedule.model_order,
            _num_layers_per_chunk=[1] * len(self.layers) if schedule.layer_wise else schedule.layers,
            _reuse_graph_input_output_buffers=True,
            pool=self.pool,
        )
        del samples
        return graphs  # type: ignore[no-any-return]

    def run(self, graphs: tuple[Callable[..., torch.Tensor], ...] | None, watch: bool = True) -> Result:
        """One step, eagerly where ``graphs`` is None. Without ``watch`` nothing is compared or copied."""
        schedule = self.schedule
        places = [(chunk, depth) for chunk, size in enumerate(schedule.layers) for depth in range(size)]
        counts = {"forward": [0] * len(places), "dgrad": [0] * len(places), "wgrad": [0] * len(places)}
        saved: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        hidden_states: dict[tuple[int, int], torch.Tensor] = {}
        grads: dict[tuple[int, int], torch.Tensor] = {}
        result = Result()
        sent: list[Send] = []

        def wait() -> None:
            if len(sent) > 1:
                result.receive(sent.pop(0))

        must_wait = False
        for entry in schedule.order:
            kind = "forward" if entry > 0 else "dgrad" if entry == int(entry) else "wgrad"
            layer = abs(int(entry)) - 1
            chunk, depth = places[layer]
            if must_wait and not (kind == "forward" and depth):
                wait()
                must_wait = False
            microbatch = counts[kind][layer]
            counts[kind][layer] += 1
            run = graphs[schedule.graph_index(layer, microbatch)] if graphs else self.layers[layer]
            if kind == "forward":
                x = hidden_states.pop((chunk, microbatch), self.inputs[chunk][microbatch]).detach().requires_grad_()
                out = torch.tanh(run(x))  # the part of a layer that stays eager
                saved[layer, microbatch] = x, out
                hidden_states[chunk, microbatch] = out
            elif kind == "dgrad":
                x, out = saved.pop((layer, microbatch))
                grad = grads.pop((chunk, microbatch), self.output_grads[chunk][microbatch])
                (grad,) = torch.autograd.grad(out, x, grad)
                if depth:
                    grads[chunk, microbatch] = grad
                elif watch:
                    sent.append(Send(grad, grad.clone()))
                    must_wait = True
            else:
                run.backward_dw()
            if watch:
                for send in sent:
                    send.changed |= (send.tensor != send.copy).any()
        while sent:
            result.receive(sent.pop(0))
        result.main_grads = [p.main_grad.clone() for layer in self.layers for p in layer.parameters()]
        self.clear_main_grads()
        return result

    def clear_main_grads(self) -> None:
        for layer in self.layers:
            for parameter in layer.parameters():
                parameter.main_grad.zero_()  # type: ignore[union-attr]


class Send:
    """A gradient that is being sent: the tensor itself, and a copy taken as the send starts."""

    def __init__(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        self.tensor, self.copy = tensor, copy
        self.changed = torch.zeros((), dtype=torch.bool, device="cuda")


class Result:
    def __init__(self) -> None:
        self.received: list[torch.Tensor] = []
        self.changed: list[torch.Tensor] = []
        self.main_grads: list[torch.Tensor] = []

    def receive(self, send: Send) -> None:
        self.received.append(send.tensor.clone())
        self.changed.append(send.changed)


def error(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float | None:
    if not FUSED:
        return None
    difference = sum(float((a.double() - b.double()).norm()) ** 2 for a, b in zip(found, wanted, strict=True))
    return float((difference / sum(float(b.double().norm()) ** 2 for b in wanted)) ** 0.5)


def pool_mib(pool: Any) -> float | None:
    """The memory that the graphs' pool has taken from the GPU."""
    gc.collect()
    if ON_SIMULATOR:
        from tests.simulator.memory import pools

        return sum(found.reserved() for found in pools()) / 2**20
    torch.cuda.empty_cache()
    return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == pool) / 2**20


@contextmanager
def setting(fixes: list[str]) -> Iterator[None]:
    """Capture with these ``fixes``."""
    te_graph_fixes.activate(only=fixes) if fixes else te_graph_fixes.deactivate()
    if fixes:
        found = te_graph_fixes.report().fixes
        assert all(found[fix].status == "applied" for fix in fixes), {fix: found[fix] for fix in fixes}
    try:
        yield
    finally:
        te_graph_fixes.deactivate()


def settings(schedule: Schedule) -> dict[str, list[str]]:
    order = ["backward-dw-order", "capture-without-warmup"] if schedule.wgrads else []
    return {"without": order, "with": [ID, *order]}


def say(**values: Any) -> None:
    print(json.dumps({"te": te_graph_fixes.report().te_version, **values}), flush=True)


SCHEDULES = {
    "first": Schedule(2, 0, [2, 2], 8),
    "last": Schedule(2, 1, [2, 2], 8),
    "longer": Schedule(2, 0, [1, 3], 4),
    "shorter": Schedule(2, 0, [3, 1], 4),
    "deep": Schedule(4, 0, [4, 4], 8),
    "wgrads": Schedule(2, 0, [2, 2], 8, wgrads=True),
    "one layer": Schedule(2, 0, [1, 1], 8),
    "model chunks": Schedule(2, 0, [2, 2], 8, layer_wise=False),
    "model chunks of one layer": Schedule(2, 0, [1, 1], 8, layer_wise=False),
}


def check(hidden: int, tokens: int, *names: str) -> None:
    for short in names or SCHEDULES:
        schedule = SCHEDULES[short]
        eager = Stage(replace(schedule, wgrads=False), hidden, tokens).run(None)
        for name, fixes in settings(schedule).items():
            stage = Stage(schedule, hidden, tokens)
            with setting(fixes):
                graphs = stage.capture()
            stage.clear_main_grads()
            steps = [stage.run(graphs) for _ in range(2)]
            say(
                schedule=short,
                what=schedule.name,
                setting=name,
                sends=len(steps[0].received),
                overwritten=[sum(map(bool, step.changed)) for step in steps],
                received_wrong=[
                    sum(not torch.equal(a, b) for a, b in zip(step.received, eager.received, strict=True))
                    for step in steps
                ],
                main_grad_error=[error(step.main_grads, eager.main_grads) for step in steps],
                pool_mib=pool_mib(stage.pool),
            )
            del graphs, stage


def memory(hidden: int, tokens: int) -> None:
    for schedule in (
        Schedule(4, 0, [2, 2], 8),
        Schedule(4, 0, [4, 4], 8),
        Schedule(4, 0, [2, 2, 2, 2], 8),
        Schedule(4, 0, [4, 4], 8, layer_wise=False),
    ):
        for name, fixes in settings(schedule).items():
            stage = Stage(schedule, hidden, tokens, wide=True)
            with setting(fixes):
                graphs = stage.capture()
            say(schedule=schedule.name, setting=name, hidden=hidden, tokens=tokens, pool_mib=pool_mib(stage.pool))
            del graphs, stage


def replay_time(hidden: int, tokens: int, rounds: int = 15) -> None:
    for schedule in (Schedule(2, 0, [2, 2], 8), Schedule(4, 0, [4, 4], 8), Schedule(2, 0, [2, 2], 8, layer_wise=False)):
        stages = {}
        for name, fixes in settings(schedule).items():
            stage = Stage(schedule, hidden, tokens, wide=True)
            with setting(fixes):
                stages[name] = stage, stage.capture()
        times: dict[str, list[float]] = {name: [] for name in stages}
        for _ in range(rounds + 2):
            for name, (stage, graphs) in stages.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                stage.run(graphs, watch=False)
                torch.cuda.synchronize()
                times[name].append(1e3 * (time.perf_counter() - start))
        medians = {name: sorted(values[2:])[rounds // 2] for name, values in times.items()}
        spread = {name: [min(values[2:]), max(values[2:])] for name, values in times.items()}
        say(
            schedule=schedule.name,
            hidden=hidden,
            median_ms=medians,
            min_max_ms=spread,
            ratio={name: value / medians["without"] for name, value in medians.items()},
        )
        del stages, stage, graphs


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "check":
        hidden, tokens, *names = arguments or ("1024", "2048")
        check(int(hidden), int(tokens), *names)
    elif command == "memory":
        memory(int(arguments[0]), tokens=4096)
    elif command == "time":
        replay_time(hidden=2048, tokens=2048)
    else:
        sys.exit(__doc__)
