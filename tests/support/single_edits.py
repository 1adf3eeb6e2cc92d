"""Run the cases of a fix without one of its edits, until a case fails or differs from eager training.

``python -m tests.simulator tests/support/single_edits.py FIX NUMBER`` prints a JSON line for each case. The NUMBER -1
omits no edit. `tests.support.left_out` contains programs for edits that change no result of a case.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

import te_graph_fixes
from te_graph_fixes.fix import Assessment, Fix
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.source import Source


def leave_out(fix_id: str, number: int) -> None:
    """Omit the edit ``number`` of a fix when TransformerEngine is imported. -1 omits no edit."""

    def without_one(source: Source, verdict: Assessment) -> Assessment:
        kept = tuple(edit for place, edit in enumerate(verdict.edits) if place != number)
        return dataclasses.replace(verdict, edits=kept)

    alter(fix_id, without_one)


@dataclasses.dataclass(frozen=True)
class AlteredFix(Fix):
    """A fix that passes each of its verdicts through the function ``altered``."""

    altered: Callable[[Source, Assessment], Assessment] = lambda _, verdict: verdict

    def assess(self, source: Source) -> Assessment:
        return self.altered(source, super().assess(source))


def alter(fix_id: str, altered: Callable[[Source, Assessment], Assessment]) -> None:
    """Replace each verdict of a fix with the result of ``altered``, from the next import of TransformerEngine on."""
    fields = {field.name: getattr(CATALOGUE[fix_id], field.name) for field in dataclasses.fields(Fix)}
    CATALOGUE[fix_id] = AlteredFix(**fields, altered=altered)


def main(fix_id: str, number: int) -> None:
    leave_out(fix_id, number)
    import torch
    import transformer_engine.pytorch  # noqa: F401

    from tests.support.left_out import OTHERS
    from tests.verify.cases import select
    from tests.verify.child import _measure

    figures = {"reserved": 0, "allocated": 0}
    replay = torch.cuda.CUDAGraph.replay

    def measured(graph: Any) -> None:
        replay(graph)
        figures["reserved"] = max(figures["reserved"], torch.cuda.memory_reserved())
        figures["allocated"] = max(figures["allocated"], torch.cuda.memory_allocated())

    torch.cuda.CUDAGraph.replay = measured
    status = te_graph_fixes.report().fixes[fix_id]
    if fix_id in OTHERS and status.status == "applied":
        name = OTHERS[fix_id].__name__
        print(json.dumps({"case": name, "outcome": "measured", "error": 0.0, name: OTHERS[fix_id]()}), flush=True)
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
