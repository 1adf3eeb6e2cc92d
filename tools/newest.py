"""``python -m tools.newest [FOLDER ...]``: compare verdicts on a new TransformerEngine (TE) with the expected verdicts.

    python -m tools.newest                                     # the newest release
    python -m tools.newest te                                  # a checkout, or a site-packages folder
    python -m tools.newest te --ref pull/3353/merge            # refs of a git repository, instead of its working tree

The tool prints the verdicts for each TE. Its exit status is 1 if a verdict is ``unrecognized``, or is not the expected
verdict for the version (``not-applicable`` counts as ``not-needed``). In this case, see "Support a new TE" in
CONTRIBUTING.md. To fetch a ref, run `git fetch origin pull/3353/merge:refs/pull/3353/merge`.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from te_graph_fixes.decision import read
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.source import Source
from te_graph_fixes.status import Verdict
from tests.support.published import source

PARTS = ("transformer_engine/__init__.py", "transformer_engine/pytorch", "build_tools/VERSION.txt")
"""The files and folders of a TE repository that determine the verdicts and the version."""


def unexpected(tree: Source) -> list[str]:
    """Print the verdicts for ``tree``, and return the ids of the fixes with an unexpected verdict."""
    print(f"\nTransformerEngine {tree.version} in {tree.location}\n")
    found = []
    for fix_id, assessment in read(tree).assessments.items():
        guess = CATALOGUE[fix_id].expected(tree.version)
        verdict = assessment.verdict
        if (Verdict.NOT_NEEDED if verdict == Verdict.NOT_APPLICABLE else verdict) != guess:
            found.append(fix_id)
        mark = "!" if fix_id in found else " "
        print(f"{mark} {fix_id:26} {verdict:14} expected {guess or '-':12} {assessment.reason}")
    return found


def at_ref(repository: Path, ref: str, folder: Path) -> Path:
    """Extract `PARTS` from ``ref`` of a repository into a new folder below ``folder``, and return the new folder."""
    git = ["git", "-C", str(repository), "archive", ref, *PARTS]
    archive = subprocess.run(git, capture_output=True, check=True).stdout
    tree = folder / ref.replace("/", "-")
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(tree, filter="data")
    return tree


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.newest")
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--ref", action="append", default=[], help="a branch, tag, commit or pull/NUMBER/merge")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        if options.ref:
            folders = [at_ref(*options.folders, ref, Path(scratch)) for ref in options.ref]
        else:
            folders = options.folders or [source("newest")]
        surprises = {fix for folder in folders for fix in unexpected(Source.at(folder))}
    if surprises:
        print(f"\nnot as expected: {', '.join(sorted(surprises))}; see 'Support a new TE' in CONTRIBUTING.md")
    return int(bool(surprises))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
