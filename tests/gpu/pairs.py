"""Every pair of the fixes that the installed TransformerEngine (TE) needs, on its own: JSON lines, a summary last.

    python tests/gpu/pairs.py [PROCESSES]

With a pair on, and what the two require, every case of either must come out as with all fixes on: bit-identical to
eager. A case that needs further fixes is not run; ``unseen`` are the pairs that have no other. Exits with 1 unless
every case is right.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from te_graph_fixes.decision import verdicts
from te_graph_fixes.fix import APPLICABLE
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.source import Source
from te_graph_fixes.settings import SWITCH
from te_graph_fixes.verify.cases import CASES
from te_graph_fixes.verify.runner import Child


def required(fix_id: str) -> set[str]:
    return {fix_id}.union(*map(required, CATALOGUE[fix_id].requires))


def run(pair: tuple[str, str], needed: set[str]) -> dict[str, Any]:
    """The cases of a pair that come out wrong, and how many are right."""
    on = (required(pair[0]) | required(pair[1])) & needed
    child = Child({**os.environ, SWITCH: ",".join(sorted(on))})
    wrong, right, skipped = {}, 0, 0
    try:
        for case in CASES.values():
            if set(pair) & set(case.fixes) and set(case.fixes) & needed <= on:
                found = child.measure(case)
                if found.outcome == "skipped":
                    skipped += 1
                elif found.right and set(found.applied) == on:
                    right += 1
                else:
                    wrong[case.name] = found.text if set(found.applied) == on else f"applied: {found.applied}"
    finally:
        child.close()
    return {"pair": pair, "on": sorted(on), "right": right, "wrong": wrong, "skipped": skipped}


def main() -> int:
    found = verdicts(Source.installed())
    needed = {fix_id for fix_id, verdict in found.items() if verdict.verdict == APPLICABLE}
    results = []
    with ThreadPoolExecutor(int(sys.argv[1]) if sys.argv[1:] else 6) as pool:
        for result in pool.map(lambda pair: run(pair, needed), itertools.combinations(sorted(needed), 2)):
            results.append(result)
            print(json.dumps(result), flush=True)
    wrong = [result["pair"] for result in results if result["wrong"]]
    unseen = [result["pair"] for result in results if not result["wrong"] and not result["right"]]
    right = sum(result["right"] for result in results)
    summary = {"te": Source.installed().version, "pairs": len(results), "right": right, "wrong": wrong}
    print(json.dumps({**summary, "unseen": unseen}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
