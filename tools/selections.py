"""Test on the simulator whether a selection of fixes is ever worse than TransformerEngine (TE) without fixes.

    python -m tools.selections [SELECTION ...]

If a selection is worse, one of its fixes must ``require`` a fix that the selection lacks. A selection is ``without
FIX`` (all fixes except this fix and the fixes that require it), ``only FIX`` (this fix and the fixes that it requires)
or ``upstream``. By default, all selections run, for the fixes that the installed TE needs. Each case of `verify` runs
without fixes and with the selection. A line of JSON for each selection lists the cases with a wrong result, and the
cases with a worse result than without fixes. The exit status is 1 if a result is worse. ``--cases`` selects cases, or
the cases of fixes. ``--workers`` is the number of selections that run at a time.

TE is imported once. Each selection runs in a fork of that process, and each case in a fork of the selection's process.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import te_graph_fixes
from te_graph_fixes.fixes import assess
from te_graph_fixes.patching.source import Source
from te_graph_fixes.settings import DISABLE, SWITCH, VERBOSE
from te_graph_fixes.status import Verdict
from tests.simulator import install
from tests.verify import child
from tests.verify.cases import Case, select
from tests.verify.runner import Outcome

LIMIT = 300
"""The time limit of a case in seconds."""
GARBAGE = 15.0
"""A larger error comes from uninitialized memory, so it is different in each run."""
OF_OTHERS = ("checkpoints-of-a-chunk",)
"""Cases in which, without `param-grad-lifetime`, other graphs have overwritten the gradients."""
ALIKE = 1.01
"""A selection is worse if its error is more than this factor times the error without fixes."""


def selections() -> list[str]:
    """List all selections for the installed TE."""
    needed = [fix_id for fix_id, verdict in assess(Source.installed()).items() if verdict.verdict == Verdict.APPLICABLE]
    return ["upstream", *(f"{word} {fix_id}" for word in ("without", "only") for fix_id in needed)]


def variables(selection: str) -> dict[str, str]:
    """Return the environment variables that select a selection, or no fixes for ``off``."""
    word, _, fix_id = selection.partition(" ")
    return {SWITCH: "on", DISABLE: fix_id} if word == "without" else {SWITCH: fix_id or word}


def measured(selection: str, cases: Sequence[Case]) -> dict[str, Outcome]:
    """Apply a selection in this process, and measure each case in a fork of it."""
    os.environ.update(variables(selection))
    te_graph_fixes.activate()
    return {case.name: _in_a_fork(case) for case in cases}


def _in_a_fork(case: Case) -> Outcome:
    reads, writes = os.pipe()
    if (process := os.fork()) == 0:
        signal.alarm(LIMIT)
        os.dup2(writes, 1)
        try:
            child.main([case.name])
        finally:
            os._exit(0)
    os.close(writes)
    with open(reads) as pipe:
        line = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if not line:
        return Outcome("failed", detail=f"the process ended with status {status}")
    found = json.loads(line)
    return Outcome(**{name: value for name, value in found.items() if name not in ("case", "last")})


def worse(case: Case, found: Outcome, alone: Outcome) -> bool:
    """Return whether an outcome is worse than the outcome without fixes (``alone``).

    An exception is worse than a correct number, and a wrong number is worse than both. All wrong numbers are equal for
    programs that break a replay precondition and for `OF_OTHERS`, because these programs read memory of other graphs.
    """
    if found.error and alone.error:
        larger = found.error > ALIKE * alone.error and alone.error <= GARBAGE
        return larger and not case.options.get("breaks") and case.name not in OF_OTHERS
    return _rank(found) > _rank(alone)


def _rank(outcome: Outcome) -> int:
    return 0 if outcome.correct else 2 if outcome.outcome == "measured" else 1


def compared(selection: str, cases: Sequence[Case], alone: dict[str, Outcome]) -> dict[str, Any]:
    """Measure the cases with a selection, and compare the outcomes with those without fixes (``alone``)."""
    found = measured(selection, cases)
    bad = [case.name for case in cases if worse(case, found[case.name], alone[case.name])]
    return {
        "selection": selection,
        "applied": len(next(iter(found.values())).applied),
        "wrong": {name: each.text for name, each in found.items() if not each.correct},
        "worse": {name: f"{alone[name].text} -> {found[name].text}" for name in bad},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("selections", nargs="*", metavar="SELECTION")
    parser.add_argument("--cases", nargs="*", default=[], metavar="CASE")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    te_graph_fixes.deactivate()
    os.environ.update({DISABLE: "", VERBOSE: "0"})
    install()
    importlib.import_module("tests.verify.programs")
    gc.freeze()  # garbage collection in the forks ignores the objects of this process
    chosen, any_worse = options.selections or selections(), False
    with multiprocessing.get_context("fork").Pool(options.workers, maxtasksperchild=1) as pool:
        each = pool.map(functools.partial(measured, "off"), ([case] for case in select(options.cases)), chunksize=1)
        alone = {name: found for part in each for name, found in part.items() if found.outcome != "skipped"}
        wrong = {name: found.text for name, found in alone.items() if found.wrong}
        print(json.dumps({"selection": "off", "cases": len(alone), "wrong": wrong}), flush=True)
        cases = [case for case in select(options.cases) if case.name in alone]
        for line in pool.imap_unordered(functools.partial(compared, cases=cases, alone=alone), chosen):
            print(json.dumps(line), flush=True)
            any_worse = any_worse or bool(line["worse"])
    sys.exit(any_worse)


if __name__ == "__main__":
    main()
