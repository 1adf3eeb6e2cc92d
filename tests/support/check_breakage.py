"""A training with one edit of a fix left out: whether graph and eager differ, and what the check finds.

    python tests/support/check_breakage.py                                               # prints each FIX NUMBER CASE
    python -m tests.simulator tests/support/check_breakage.py FIX NUMBER CASE            # a line of JSON for one
    python tests/support/check_breakage.py | xargs -L 1 python -m tests.simulator tests/support/check_breakage.py

On a GPU without ``-m tests.simulator``.
"""

from __future__ import annotations

import json
import sys

import te_graph_fixes
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.source import Source
from tests.support.single_edits import leave_out

DEFECTS = {
    "grouped-linear-skip-flag": "experts-fp8-delayed",
    "warmup-reset": "linear-bf16",
    "backward-dw-order": "two-chunks-wgrads-last",
    "backward-dw-hooks": "hooks-after-wgrad",
    "delayed-wgrad-delivery": "delayed-unfused",
    "param-grad-lifetime": "plain-grad",
    "stale-fp8-weights": "other-module-first",
}
"""By a defect that a check can see, a case of `verify` which has it."""


def edits() -> list[tuple[str, int, str]]:
    """Each edit that this TransformerEngine needs against one of `DEFECTS`, and the case."""
    source = Source.installed()
    return [
        (fix, number, case)
        for fix, case in DEFECTS.items()
        for number in range(len(CATALOGUE[fix].verdict(source).edits))
    ]


def measure(fix_id: str, number: int, case: str) -> dict[str, object]:
    leave_out(fix_id, number)
    from te_graph_fixes.checking import twins
    from te_graph_fixes.verify.cases import CASES
    from te_graph_fixes.verify.driver.program import Program
    from te_graph_fixes.verify.driver.setting import use
    from te_graph_fixes.verify.driver.training import Training
    from te_graph_fixes.verify.programs import compare, train

    options = dict(CASES[case].options)
    line: dict[str, object] = {"fix": fix_id, "edit": number, "status": te_graph_fixes.report().fixes[fix_id].status}
    try:
        errors = compare(**options)["errors"]
        line["error"] = max(max(values, default=0.0) for values in errors.values())
        te_graph_fixes.check(3)
        use(Program(**options))
        train(graphed=True)
        line["found"] = twins.current[0].finish().mismatches
        line["left by the capture"] = sum(each.grad is not None for each in Training(graphed=True).parameters)
    except Exception as error:
        line["raised"] = f"{type(error).__name__}: {error}"
    return line


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
    else:
        print(*(f"{fix} {number} {case}" for fix, number, case in edits()), sep="\n")
