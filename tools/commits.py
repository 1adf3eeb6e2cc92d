"""Compare two versions of this package over the commits of TransformerEngine's (TE) main: verdicts and patched text.

    python -m tools.commits TE OLD [NEW] [--since 2025-09-15]

TE is a git checkout of TransformerEngine. OLD and NEW (default: this one) are checkouts of this package, made with `git
worktree add`. Only commits that changed TE's Python code are used. TE's working tree does not change, and nothing is
fetched. For every fix in both versions, the verdict and the patched text are compared. If they differ, the differences
are printed, and the exit status is 1. A commit takes about two seconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PARTS = ("transformer_engine/__init__.py", "transformer_engine/pytorch", "build_tools/VERSION.txt")
ANSWERS = """
import hashlib, json, sys
sys.path.insert(0, sys.argv[1])
from te_graph_fixes.patching.installation import patched
from te_graph_fixes.patching.source import Source
from te_graph_fixes import decision

for folder in map(str.strip, sys.stdin):
    source, answers = Source.at(folder), {}
    assess = getattr(decision, "assess", None) or decision.verdicts  # older checkouts have other names
    for fix, found in assess(source).items():
        word = str(getattr(found, "verdict", "") or found.status)
        texts = patched(source, {fix: found}) if word == "applicable" else {}
        made = {name: hashlib.sha256(text.encode()).hexdigest() for name, (_, text) in texts.items()}
        answers[fix] = word, made, found.reason.replace(folder, "TE")
    print(json.dumps(answers), flush=True)
"""


class Package(subprocess.Popen[str]):
    """A checkout of this package, in its own process."""

    def __init__(self, checkout: Path) -> None:
        command = [sys.executable, "-c", ANSWERS, str(checkout.resolve())]
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answers(self, folder: str) -> dict[str, Any]:
        """Return, for each fix, the verdict, the digests of the patched texts, and the reason."""
        assert self.stdin
        assert self.stdout
        print(folder, file=self.stdin, flush=True)
        return json.loads(self.stdout.readline())  # type: ignore[no-any-return]


def differences(old: Package, new: Package, folder: str) -> Iterator[str]:
    before, after = old.answers(folder), new.answers(folder)
    for fix in sorted(before.keys() & after.keys()):
        (word, texts, _), (new_word, new_texts, reason) = before[fix], after[fix]
        if word != new_word:
            yield f"{fix}: {word} -> {new_word}: {reason}"
        elif texts != new_texts:
            names = [name for name in texts | new_texts if texts.get(name) != new_texts.get(name)]
            yield f"{fix}: another text of {', '.join(names)}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.commits")
    for name in ("te", "old"):
        parser.add_argument(name, type=Path)
    parser.add_argument("new", type=Path, nargs="?", default=Path(__file__).parent.parent)
    parser.add_argument("--since", default="2025-09-15")
    options = parser.parse_args(arguments)
    git = ("git", "-C", str(options.te))
    log = [*git, "log", "--first-parent", "--reverse", f"--since={options.since}T00:00", "--date=short"]
    log += ["--format=%h %cd %s", "main", "--", *PARTS]
    commits, differ = subprocess.run(log, capture_output=True, check=True, text=True).stdout.splitlines(), 0
    with Package(options.old) as old, Package(options.new) as new:
        for commit in commits:
            archive = subprocess.run([*git, "archive", commit.split()[0], *PARTS], capture_output=True, check=True)
            with tempfile.TemporaryDirectory() as folder:
                subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
                if found := [*differences(old, new, folder)]:
                    differ += 1
                    print(commit, *found, sep="\n    ", flush=True)
    print(f"{differ} of {len(commits)} commits differ")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
