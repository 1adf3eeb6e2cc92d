"""The core fixes on a GPU: prints one JSON line for a case. Run it once with the fixes and once with them off.

    python tests/gpu/core_cases.py GroupedLinear fp8-delayed
    TE_GRAPH_FIXES=off python tests/gpu/core_cases.py GroupedLinear fp8-delayed
"""

import json
import sys

import te_graph_fixes
from te_graph_fixes.verify.microbatches import measure

if __name__ == "__main__":
    kind, recipe = sys.argv[1:]
    try:
        result = measure(kind, recipe)
    except Exception as failure:
        result = {"failed": f"{type(failure).__name__}: {failure}"}
    report = te_graph_fixes.report()
    applied = [fix for fix, status in report.fixes.items() if status.status == "applied"]
    print(json.dumps({"te": report.te_version, "case": [kind, recipe], "applied": applied, **result}))
