"""Capture orders of pipeline schedules, as Megatron-Core computes them. This module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest


def interleaved(stages: int, stage: int, model_chunks: int, microbatches: int, group: int | None = None) -> list[int]:
    """Return the order of model chunks on pipeline ``stage`` of ``stages`` under the interleaved 1F1B schedule.

    Each chunk runs for ``group`` microbatches (default ``stages``) before the next chunk runs.
    """
    group = group or stages
    chunks = [
        chunk
        for start in range(0, microbatches, group)
        for chunk in range(1, model_chunks + 1)
        for _ in range(start, min(start + group, microbatches))
    ]
    backward = [chunk - model_chunks - 1 for chunk in chunks]
    warmup = min((stages - stage - 1) * 2 + (model_chunks - 1) * group, len(chunks))
    order = chunks[:warmup]
    for forward, dgrad in zip(chunks[warmup:], backward, strict=False):
        order += [forward, dgrad]
    return order + backward[len(chunks) - warmup :]


def layer_wise(order: Sequence[int], layers: Sequence[int], wgrads: bool = False) -> list[float]:
    """Return ``order`` with each layer as a chunk, as Megatron's ``overlap_moe_expert_parallel_comm`` passes it.

    ``layers`` contains the number of layers of each model chunk. A model chunk's dgrads alternate with the forwards
    of the next entry. With ``wgrads``, wgrads are delayed and have entries of their own.
    """

    def forwards(entry: int) -> list[int]:
        first = sum(layers[: entry - 1]) + 1
        return list(range(first, first + layers[entry - 1]))

    def dgrads(entry: int) -> list[int]:
        return [-chunk for chunk in reversed(forwards(-entry))]

    first_dgrad = next(i for i, entry in enumerate(order) if entry < 0)
    last_forward = max(i for i, entry in enumerate(order) if entry > 0)
    result: list[float] = [chunk for entry in order[:first_dgrad] for chunk in forwards(entry)]
    for i in range(first_dgrad, last_forward, 2):
        below = dgrads(order[i])
        for dgrad, forward in zip_longest(below, forwards(order[i + 1])):
            if forward:
                result.append(forward)
            if dgrad:
                result.append(dgrad)
                if wgrads and dgrad != below[-1]:
                    result.append(dgrad - 0.5)
        if wgrads:
            result.append(below[-1] - 0.5)
    for entry in order[last_forward + 1 :]:
        for dgrad in dgrads(entry):
            result += [dgrad, dgrad - 0.5] if wgrads else [dgrad]
    return result
