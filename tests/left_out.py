"""The cases of `verify` that are about a fix, with one edit of it left out, until one gives something else.

python -m tests.simulator tests/left_out.py FIX NUMBER prints a line of JSON for each case; -1 leaves nothing out.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import te_graph_fixes
from te_graph_fixes.fix import Verdict
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.source import Source


def leave_out(fix_id: str, number: int) -> None:
    """Let a fix go without one of its edits, from TransformerEngine's import on; ``-1`` leaves none out."""
    fix = CATALOGUE[fix_id]

    def without_one(source: Source) -> Verdict:
        verdict = fix.examine(source)
        kept = tuple(edit for place, edit in enumerate(verdict.edits) if place != number)
        return dataclasses.replace(verdict, edits=kept)

    CATALOGUE[fix_id] = dataclasses.replace(fix, examine=without_one)


def main(fix_id: str, number: int) -> None:
    leave_out(fix_id, number)
    import torch
    import transformer_engine.pytorch  # noqa: F401

    from te_graph_fixes.verify.cases import select
    from te_graph_fixes.verify.child import _measure

    figures = {"reserved": 0, "allocated": 0}
    replay = torch.cuda.CUDAGraph.replay

    def measured(graph: Any) -> None:
        replay(graph)
        figures["reserved"] = max(figures["reserved"], torch.cuda.memory_reserved())
        figures["allocated"] = max(figures["allocated"], torch.cuda.memory_allocated())

    torch.cuda.CUDAGraph.replay = measured
    status = te_graph_fixes.report().fixes[fix_id]
    for case in sorted(select([fix_id]), key=lambda case: not case.quick):
        figures.update(dict.fromkeys(figures, 0))
        found = _measure(case) if status.status == "applied" else {"outcome": status.status, "detail": status.reason}
        if found["outcome"] != "skipped":
            result = {name: found[name] for name in ("outcome", "error", "detail") if name in found}
            print(json.dumps({"case": case.name, **result, **figures}), flush=True)
        if found["outcome"] not in ("skipped", "measured") or found.get("error"):
            return


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
