"""Whether two runs of a program of the explorer gave the same."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import torch.distributed as dist

from .events import OF_GRAPHS, train
from .setting import connect, program


def differences(found: Any, wanted: Any) -> dict[str, float]:
    """Where two runs differ, with the largest error: the norm of the difference over the norm of what is wanted."""
    errors = {}
    for name in sorted({*wanted, *found} - {OF_GRAPHS}):
        pairs = list(zip(found.get(name, ()), wanted.get(name, ()), strict=False))
        same = len(found.get(name, ())) == len(wanted.get(name, ()))
        if not same or not all(map(equal, *zip(*pairs, strict=True))) if pairs else not same:
            errors[name] = max((error(*pair) for pair in pairs), default=1.0) if same else 1.0
    return errors


def equal(found: torch.Tensor | None, wanted: torch.Tensor | None) -> bool:
    if found is None or wanted is None:
        return found is wanted
    same = found.shape == wanted.shape and found.dtype == wanted.dtype
    return same and torch.equal(found.nan_to_num(9e9), wanted.nan_to_num(9e9))


def error(found: torch.Tensor | None, wanted: torch.Tensor | None) -> float:
    if equal(found, wanted):
        return 0.0
    if found is None or wanted is None or found.shape != wanted.shape:
        return 1.0
    result = float((found.double() - wanted.double()).norm() / wanted.double().norm())
    return result if math.isfinite(result) else math.inf


if __name__ == "__main__":
    if program.ranks:
        connect()
    eager = train(graphed=False)
    assert not differences(train(graphed=False), eager), "eager training differs from itself"
    found = differences(train(graphed=True), eager)
    if program.ranks:
        of_ranks: list[Any] = [{}, {}]
        dist.all_gather_object(of_ranks, found)
        found = {f"rank {rank}: {name}": size for rank in (0, 1) for name, size in of_ranks[rank].items()}
    for name, size in found.items():
        print(f"{name}: {size:.3g}")
    sys.exit("graphs and eager differ" if found else 0)
