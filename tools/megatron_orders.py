"""How the orders that Megatron-Core makes for its EP overlap fare under TransformerEngine's (TE's) reuse of inputs.

python tools/megatron_orders.py FOLDER      # with an unpacked megatron-core wheel; nothing of it is imported
"""

from __future__ import annotations

import ast
import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from te_graph_fixes.shipped.graph_order import DGRAD, FORWARD, Buffers, Entry, Plan, parse

MODULES = ("megatron/core/transformer/cuda_graphs.py", "megatron/core/pipeline_parallel/schedules.py")
FUNCTIONS = ("get_overlap_moe_expert_parallel_comm_order", "convert_schedule_table_to_order", "get_schedule_table")


def functions(folder: str) -> dict[str, Any]:
    """The three functions of Megatron-Core that make an order."""
    found: dict[str, Any] = {"partial": functools.partial, "zip_longest": itertools.zip_longest}
    for path in MODULES:
        text = Path(folder, path).read_text()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS:
                exec(ast.unparse(node), found)
    return found


def orders(folder: str) -> Iterator[list[float]]:
    """Orders with wgrads for 2 to 8 stages, 1 to 4 model chunks of 1 to 3 layers, even and uneven."""
    megatron = functions(folder)
    for stages, chunks, groups in itertools.product((2, 4, 8), (1, 2, 3, 4), (1, 2, 4)):
        layers = {(size,) * chunks for size in (1, 2, 3)}
        for odd in range(chunks):
            layers |= {
                tuple(size + (chunk == odd) * step for chunk in range(chunks)) for size, step in ((1, 1), (2, -1))
            }
        for stage, sizes in itertools.product(range(stages), sorted(layers)):
            ahead = stages - stage - 1
            warmup = ahead if chunks == 1 else ahead * 2 + (chunks - 1) * stages + 1
            table = megatron["get_schedule_table"](stages * groups, chunks, stages)
            order = megatron["convert_schedule_table_to_order"](min(warmup, len(table)), chunks, table)
            yield megatron["get_overlap_moe_expert_parallel_comm_order"](order, list(sizes), True)[0]


def te_inputs(entries: Sequence[Entry]) -> tuple[int, bool]:
    """The number of input sets that TE uses, and whether it hands one on while a wgrad has yet to read it."""
    free: list[int] = []
    used: dict[tuple[int, int], int] = {}
    last_reads: list[int] = []
    early = False
    for position, entry in enumerate(entries):
        key = entry.chunk, entry.microbatch
        if entry.kind == FORWARD:
            if not free:
                free.append(len(last_reads))
                last_reads.append(-1)
            used[key] = free.pop(0)
            early |= last_reads[used[key]] > position
            last_reads[used[key]] = entry.last_read
        elif entry.kind == DGRAD:
            free.append(used[key])
    return len(last_reads), early


def main(folder: str) -> None:
    counts = {"orders": 0, "te hands inputs on early": 0, "more inputs than te": 0, "more grad outputs than te": 0}
    for order in {tuple(order) for order in orders(folder)}:
        entries = parse(order)
        te_sets, early = te_inputs(entries)
        buffers, plan = Buffers(), Plan(entries, [1] * (1 + max(entry.chunk for entry in entries)))
        inputs = {buffers.take(0, i, entry.last_read) for i, entry in enumerate(entries) if entry.kind == FORWARD}
        grad_outputs = {plan.grad_output(i, 0) for i, entry in enumerate(entries) if entry.kind == DGRAD}
        counts["orders"] += 1
        counts["te hands inputs on early"] += early
        counts["more inputs than te"] += len(inputs) > te_sets
        counts["more grad outputs than te"] += len(grad_outputs) > 1
    print(counts)


if __name__ == "__main__":
    main(sys.argv[1])
