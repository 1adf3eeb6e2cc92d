"""Compare the peak memory of captures. Programs with equal memory needs should have equal peaks."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch

from .driver.graphs import Captured
from .driver.program import Program
from .driver.setting import require, use

LIMIT = 1.01
"""The largest ratio of two peaks that count as equal."""


def compare(programs: Mapping[str, Mapping[str, Any]], **shared: Any) -> dict[str, Any]:
    """Capture several `Program`s, which should need equal amounts of memory, and return their errors and peaks.

    Each program has the ``shared`` options and its own. Its error is its peak divided by the lowest peak, minus 1. The
    error is 0.0 if this ratio is at most `LIMIT`. ``peaks`` are in bytes.
    """
    highest = {name: _highest(Program(**{**shared, **own})) for name, own in programs.items()}
    ratios = {name: peak / min(highest.values()) for name, peak in highest.items()}
    errors = {name: [ratio - 1 if ratio > LIMIT else 0.0] for name, ratio in ratios.items()}
    return {"errors": errors, "peaks": highest}


def _highest(program: Program) -> int:
    """Return the highest peak of a program's second run, because the first run allocates permanent workspaces."""
    peaks(program)
    return max(peaks(program))


def peaks(program: Program) -> list[int]:
    """Return the peak memory of each capture, in bytes above the memory allocated before the capture."""
    require(program.recipe, program.other)
    use(program)
    training = _Measured(graphed=True)
    training.release()
    return training.peaks


class _Measured(Captured):
    def __init__(self, graphed: bool) -> None:
        self.peaks: list[int] = []
        super().__init__(graphed)

    def graph(self, modules: Any, samples: Any, **options: Any) -> Any:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        graphs = super().graph(modules, samples, **options)
        self.peaks.append(torch.cuda.max_memory_allocated() - before)
        return graphs
