"""Named and random schedules (``_order``) for tests. This module does not import torch."""

from __future__ import annotations

import random
from collections.abc import Collection

from tests.verify.cases import PIPELINED

# The result of get_overlap_moe_expert_parallel_comm_order in Megatron-Core 0.16.1 for the last of 2 stages, 2 model
# chunks of 2 and 1 layers, and 4 microbatches. In this order, TransformerEngine reuses a set of inputs too early.
UNEVEN = [
    *(1, 2, 1, 2, 3, 3, 1, -3, 2, -3.5, 1, -3, 2, -3.5, 3, -2, -2.5, -1, -1.5, 3, -2, -2.5, -1, -1.5),
    *(-3, -3.5, -3, -3.5, -2, -2.5, -1, -1.5, -2, -2.5, -1, -1.5),
]

NAMED: dict[str, list[float]] = {
    "next forward before the wgrad": [1, -1, 1, -1.5, -1, -1.5],
    "two chunks, wgrads last": [1, 2, -2, -1, -2.5, -1.5],
    "two microbatches, wgrads last": [1, 1, -1, -1, -1.5, -1.5],
    "Megatron-Core, uneven layers": UNEVEN,
    "TE #2376": [*PIPELINED],
}


def random_order(rng: random.Random, chunks: int, microbatches: int, delayed: Collection[int]) -> list[float]:
    """Return a random legal order. The chunks in ``delayed`` (counted from 1) have entries for wgrads."""
    done = {(kind, chunk): 0 for kind in "fdw" for chunk in range(1, chunks + 1)}
    order: list[float] = []
    while True:
        next_entries: list[tuple[tuple[str, int], float]] = []
        for chunk in range(1, chunks + 1):
            forwards, dgrads, wgrads = (done[kind, chunk] for kind in "fdw")
            if forwards < microbatches:
                next_entries.append((("f", chunk), chunk))
            if dgrads < forwards:
                next_entries.append((("d", chunk), -chunk))
            if wgrads < dgrads and chunk in delayed:
                next_entries.append((("w", chunk), -chunk - 0.5))
        if not next_entries:
            return order
        counted, entry = rng.choice(next_entries)
        done[counted] += 1
        order.append(entry)


def random_orders(seed: int, number: int) -> list[list[float]]:
    """Return ``number`` random legal orders with delayed wgrads, up to 6 microbatches and up to 4 chunks."""
    rng = random.Random(seed)
    orders = []
    for _ in range(number):
        chunks = rng.randint(1, 4)
        orders.append(random_order(rng, chunks, rng.randint(1, 6), range(1, chunks + 1)))
    return orders


def legal(order: list[float]) -> bool:
    """Return whether ``order`` is legal.

    Each chunk must run a forward, a dgrad and, if delayed, a wgrad of each microbatch, in this order.
    """
    chunks = {int(abs(value)) for value in order}
    if not order or chunks != set(range(1, len(chunks) + 1)) or any(value > 0 and value % 1 for value in order):
        return False
    microbatches = order.count(1)
    for chunk in chunks:
        places = [[i for i, v in enumerate(order) if v == value] for value in (chunk, -chunk, -chunk - 0.5)]
        if len(places[0]) != microbatches or len(places[1]) != microbatches or len(places[2]) not in (0, microbatches):
            return False
        rows = zip(*places[: 3 if places[2] else 2], strict=True)
        if any(list(row) != sorted(row) for row in rows):
            return False
    return True


def changed_order(order: list[float], choices: random.Random) -> list[float]:
    """Return ``order`` with one or two random changes. The result may still be legal."""
    changed = list(order)
    for _ in range(choices.randint(1, 2)):
        position = choices.randrange(len(changed))
        change = choices.choice(["drop", "repeat", "swap", "half", "negate", "chunk"])
        if change == "drop" and len(changed) > 1:
            del changed[position]
        elif change == "repeat":
            changed.insert(choices.randrange(len(changed) + 1), changed[position])
        elif change == "swap":
            other = choices.randrange(len(changed))
            changed[position], changed[other] = changed[other], changed[position]
        elif change == "half":
            changed[position] += choices.choice([-0.5, 0.5])
        elif change == "negate":
            changed[position] = -changed[position]
        elif change == "chunk":
            changed[position] += choices.choice([-1, 1])
    return changed
