"""Is any choice of fixes worse than TransformerEngine (TE) alone? ``python -m tests.choices [CHOICE ...]``, simulator.

A choice is ``without FIX`` (all but this one, and those that require it), ``only FIX`` (this one with those that it
requires) or ``upstream``; by default all of them, for the fixes that the installed TE needs. Each case of `verify` is
measured with TE alone and with the choice. A line of JSON says what a choice makes of the cases that are wrong with it,
which of these it makes worse than TE alone does, and which of them for a known reason. ``--cases`` names the cases, or
fixes whose cases are meant.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence

from te_graph_fixes.fix import APPLICABLE
from te_graph_fixes.settings import DISABLE, SWITCH
from te_graph_fixes.source import Source
from te_graph_fixes.verdicts import verdicts, with_required
from te_graph_fixes.verify.cases import Case, select
from te_graph_fixes.verify.runner import Child, Outcome

REASONS = {
    "nested-operations": "nested-autocast",
    "norm-not-cached": "param-grad-lifetime",
    "mlp-not-cached": "param-grad-lifetime",
}
"""Cases that may be worse where a fix is left out, for a reason that docs/survey.md gives."""
UNSTEADY = {"wgrad-after-the-next-forward"}
"""Cases that read memory which others write: with TE alone they give 1.43 or inf."""

COMMAND = (sys.executable, "-m", "tests.simulator", "-m", "te_graph_fixes.verify.child")
GARBAGE = 15.0
"""A larger error comes from memory that nothing has written, and is another one in each run."""
ALIKE = 1.01
"""A choice is worse where its error is more than so many times that of TE alone."""


def choices() -> list[str]:
    """All choices for the installed TE."""
    needed = [fix_id for fix_id, verdict in verdicts(Source.installed()).items() if verdict.verdict == APPLICABLE]
    return ["upstream", *(f"{word} {fix_id}" for word in ("without", "only") for fix_id in needed)]


def variables(choice: str) -> dict[str, str]:
    """The environment variables that make a choice."""
    word, _, fix_id = choice.partition(" ")
    if word == "without":
        return {SWITCH: "on", DISABLE: fix_id}
    return {SWITCH: ",".join(sorted(with_required(fix_id))) if fix_id else word}


def measured(choice: str, cases: Sequence[Case]) -> dict[str, Outcome]:
    """The outcome of each case with a choice, or with ``off``: TE alone."""
    child = Child({**os.environ, DISABLE: "", **variables(choice)}, COMMAND)
    try:
        return {case.name: child.measure(case, 600.0) for case in cases}
    finally:
        child.close()


def worse(found: Outcome, alone: Outcome) -> bool:
    """Whether an outcome is worse than that of TE alone: an exception than a right number, a wrong number than both."""
    if found.error and alone.error:
        return found.error > ALIKE * alone.error and alone.error <= GARBAGE
    return _rank(found) > _rank(alone)


def _rank(outcome: Outcome) -> int:
    return 0 if outcome.right else 2 if outcome.outcome == "measured" else 1


def report(names: Iterable[str], cases: Sequence[Case]) -> Iterator[dict[str, object]]:
    """What each choice makes of the cases."""
    alone = {name: found for name, found in measured("off", cases).items() if found.outcome != "skipped"}
    yield {"choice": "off", "cases": len(alone), "wrong": {name: f.text for name, f in alone.items() if f.wrong}}
    kept = [case for case in cases if case.name in alone]
    for name in names:
        found = measured(name, kept)
        bad = [case for case in found if case not in UNSTEADY and worse(found[case], alone[case])]
        explained = {case for case in bad if REASONS.get(case, case) not in (case, *found[case].applied)}
        yield {
            "choice": name,
            "applied": len(next(iter(found.values())).applied),
            "wrong": {case: each.text for case, each in found.items() if not each.right},
            "worse": {case: f"{alone[case].text} -> {found[case].text}" for case in bad if case not in explained},
            "explained": sorted(explained),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("choices", nargs="*", metavar="CHOICE")
    parser.add_argument("--cases", nargs="*", default=[], metavar="CASE")
    options = parser.parse_args()
    for line in report(options.choices or choices(), select(options.cases)):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
