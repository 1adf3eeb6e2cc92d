"""``python -m tools.newest [FOLDER ...]``: is the next TransformerEngine (TE) what the catalogue expects?

Without a FOLDER (a checkout, or a site-packages folder), the newest release. Prints the verdicts of each TE, and exits
with 1 where one is ``unrecognized`` or not what the version leads one to expect: CONTRIBUTING.md says what to do then.
"""

from __future__ import annotations

import sys

from te_graph_fixes.decision import Decision, expected
from te_graph_fixes.fix import NOT_APPLICABLE, NOT_NEEDED
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.source import Source
from te_graph_fixes.settings import Settings
from tests.support.published import source


def unexpected(tree: Source) -> list[str]:
    """Print the verdicts on ``tree``; the fixes for which the catalogue has to be looked at."""
    print(f"\nTransformerEngine {tree.version} in {tree.location}\n")
    decision = Decision(tree, Settings())
    found = []
    for fix_id, verdict in decision.decisions.items():
        guess = expected(CATALOGUE[fix_id], tree.version)
        if (NOT_NEEDED if verdict.verdict == NOT_APPLICABLE else verdict.verdict) != guess:
            found.append(fix_id)
        mark = "!" if fix_id in found else " "
        print(f"{mark} {fix_id:26} {verdict.verdict:14} expected {guess or '-':12} {verdict.reason}")
    return found


def main(folders: list[str]) -> int:
    trees = [Source.at(folder) for folder in folders or [source("newest")]]
    surprises = {fix for tree in trees for fix in unexpected(tree)}
    if surprises:
        print(f"\nnot as expected: {', '.join(sorted(surprises))}; see 'A new TransformerEngine' in CONTRIBUTING.md")
    return int(bool(surprises))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
