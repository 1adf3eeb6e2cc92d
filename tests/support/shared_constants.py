"""Programs with reused static buffers, whose layers share constants such as the rotary tables of attention.

``python -m tests.simulator tests/support/shared_constants.py`` prints a JSON object that maps each program to the
relative error of all outputs and gradients against eager training.
"""

from __future__ import annotations

import collections
import json
from typing import Any

import torch
import transformer_engine.pytorch as te

INTERLEAVED = (1, 1, 2, 2, 1, -2, 1, -2, 2, -1, 2, -1, -2, -2, -1, -1)
CHUNKS, MICROBATCHES = 2, 4
PROGRAMS = {
    "a table of each layer": lambda layer, microbatch: layer,
    "a mask of each microbatch": lambda layer, microbatch: microbatch,
    "a table of one layer": lambda layer, microbatch: microbatch + 1 if layer else 0,
}


class Layer(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.linear = te.Linear(16, 16, bias=False, params_dtype=torch.bfloat16, device="cuda")

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self.linear(x * table) * table


def tensor(requires_grad: bool = False) -> torch.Tensor:
    return torch.randn(16, 16, dtype=torch.bfloat16, device="cuda", requires_grad=requires_grad)


def train(number_of_table: Any, by_keyword: bool, graphed: bool) -> list[torch.Tensor]:
    """Return the outputs and gradients of two steps. ``number_of_table`` is a value of `PROGRAMS`."""
    torch.manual_seed(1)
    layers, tables = [Layer() for _ in range(CHUNKS)], [tensor() for _ in range(MICROBATCHES + 1)]
    runs: Any = [layer for layer in layers for _ in range(MICROBATCHES)]
    places = [(layer, microbatch) for layer in range(CHUNKS) for microbatch in range(MICROBATCHES)]
    numbers = [number_of_table(*place) for place in places]
    own = {place: tables[number] for place, number in zip(places, numbers, strict=True)}
    # Clone a table that only one graph uses, because its sample becomes a static input, which each replay overwrites.
    samples = {
        place: own[place].clone() if numbers.count(number_of_table(*place)) == 1 else own[place] for place in places
    }
    if graphed:
        runs = te.make_graphed_callables(
            tuple(layers),
            [(tensor(True),) if by_keyword else (tensor(True), samples[place]) for place in places],
            sample_kwargs=[{"table": samples[place]} if by_keyword else {} for place in places],
            _order=list(INTERLEAVED),
            _num_layers_per_chunk=[1] * CHUNKS,
            allow_unused_input=True,
            _reuse_graph_input_output_buffers=True,
        )
    torch.manual_seed(2)
    found = []
    for _ in range(2):
        saved, done = {}, collections.Counter[int]()
        for entry in INTERLEAVED:
            layer, microbatch = abs(entry) - 1, done[entry]
            done[entry] += 1
            place = layer, microbatch
            if entry > 0:
                x = saved[0, microbatch][1].detach().clone().requires_grad_() if layer else tensor(True)
                run = runs[layer * MICROBATCHES + microbatch]
                saved[place] = x, run(x, table=own[place]) if by_keyword else run(x, own[place])
                found.append(saved[place][1].detach().clone())
            else:
                x, output = saved[place]
                output.backward(saved[1, microbatch][0].grad.clone() if layer == 0 else torch.ones_like(output))
                x.grad = x.grad.clone()
                found.append(x.grad)
                found.append(layers[layer].linear.weight.grad.clone())
                layers[layer].linear.weight.grad = None
    return found


def errors() -> dict[str, float]:
    found = {}
    for name, number_of_table in PROGRAMS.items():
        for by_keyword in (False, True):
            eager, graphed = (
                torch.cat([each.float().flatten() for each in train(number_of_table, by_keyword, graphed)])
                for graphed in (False, True)
            )
            passed = "keyword" if by_keyword else "position"
            found[f"{name}, by {passed}"] = float((graphed - eager).norm() / eager.norm())
    return found


if __name__ == "__main__":
    print(json.dumps(errors()))
