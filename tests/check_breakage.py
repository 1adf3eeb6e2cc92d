"""A training with one edit of a fix left out: what the check finds, and whether graph and eager differ.

python -m tests.simulator tests/check_breakage.py FIX NUMBER CASE
"""

from __future__ import annotations

import json
import sys

import te_graph_fixes
from te_graph_fixes.verify.cases import CASES
from tests.left_out import leave_out


def main(fix_id: str, number: int, case: str) -> None:
    leave_out(fix_id, number)
    from te_graph_fixes.verify.training import Setup, compare, train

    options = dict(CASES[case].options)
    line: dict[str, object] = {"status": te_graph_fixes.report().fixes[fix_id].status}
    try:
        errors = compare(**options)["errors"]
        line["error"] = max(max(values, default=0.0) for values in errors.values())
        te_graph_fixes.check(3)
        list(train(Setup(**options), graphed=True))
        from te_graph_fixes.checking.callables import finish

        line["found"] = [str(each) for each in finish().mismatches]
    except Exception as error:
        line["raised"] = f"{type(error).__name__}: {error}"
    print(json.dumps(line))


main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
