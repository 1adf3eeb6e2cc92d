"""What a script does that runs one program."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

with contextlib.suppress(ImportError):
    import te_graph_fixes  # noqa: F401  # TE_GRAPH_FIXES=off shows TE as it is

import torch.distributed as dist

from te_graph_fixes.verify.driver.comparison import differences
from te_graph_fixes.verify.driver.events import train
from te_graph_fixes.verify.driver.setting import program

from .kinds import connect

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
