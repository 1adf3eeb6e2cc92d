"""The comparisons of a process, their mismatches, and the summary.

Nothing here waits for the GPU within a step. Each comparison stores its result on the GPU, and all results are read at
the end of the step. Waiting after each replay would hide races, which occur only if the host is ahead of the GPU.
"""

import atexit
import contextlib
import functools
import itertools
import json
import operator
import os
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..activation import report
from ..agreement import numbered_ranks
from ..decision import read
from ..fix import Fix
from ..fixes import CATALOGUE
from ..patching.source import Source
from ..ranks import rank
from ..status import Status, Verdict
from ..text import by_value, count, print_stderr
from . import EXIT_MISMATCH, Options
from .difference import relative_error
from .lifetimes import PARAMETER, Lifetimes, Subject

NOISE_FACTOR = 8
"""A relative error is a mismatch if it is larger than this multiple of the relative error of two eager runs."""
MAX_NOISE = 0.1
"""A tensor is no mismatch if the relative error of two eager runs is at least this, as in uninitialized memory."""
RANK_TIMEOUT_S = 60
"""The time in seconds that rank 0 waits for the other ranks at the end of its process."""
UNEQUAL = {None: "is missing", False: "is not set, unlike in the eager run", True: "is set, unlike in the eager run"}
"""The text of a mismatch, by the value of the graph: None if a tensor is missing, a bool if the value is a mark."""
NOT_COVERED = "failed captures, modules without graphs, the order in which ranks run hooks, races between streams"
JOB = "_TE_GRAPH_FIXES_CHECKED_JOB"
"""The environment variable with the id of the first process that checks. Its child processes inherit the variable."""
_numbers = itertools.count()  # Each rank starts its checks in the same order, so the numbers are equal on all ranks.


def print_line(text: str) -> None:
    """Print a line that names the rank of this process."""
    number = torch.distributed.get_rank() if torch.distributed.is_initialized() else rank() or "0"
    print_stderr(f"te-graph-fixes check: rank {number}, {text}")


class Check:
    """The check of this process: its modules, their comparisons, and the summary."""

    def __init__(self, options: Options) -> None:
        self.totals: Counter[str] = Counter()
        self.mismatches: list[str] = []
        self.references: list[Any] = []
        self.lifetimes = Lifetimes(self.compare)
        self.numbers = itertools.count()  # the numbers of callables
        self.step, self.finished, self._options = 1, False, options
        self._called: dict[Any, Any] = {}
        """For each reference called in this step, the state of its parameters; None after an optimizer's step."""
        self._pending: list[tuple[torch.Tensor | float, Subject, str]] = []
        self._noise: dict[str, torch.Tensor] = {}
        """The largest relative error of two eager runs, by the kind of subject."""
        self._printed: set[object] = set()
        self._job: tuple[Any, int, int] = torch.distributed.HashStore(), 0, 1
        """The store of the process group, the rank of this process, and the number of ranks."""
        self._name = f"te_graph_fixes/check {next(_numbers)}"
        self._is_child = os.environ.setdefault(JOB, str(os.getpid())) != str(os.getpid())
        self._hook = register_optimizer_step_post_hook(lambda *_: self._called.update(dict.fromkeys(self._called)))
        atexit.register(self.finish)

    def enter(self, reference: Any, first: bool | None) -> bool:
        """Record a call of a callable, and begin a new step if necessary. Return whether to compare the call.

        ``first`` is the call's ``is_first_microbatch``. docs/check.md describes what begins a step.
        """
        parameters = [p for p in reference.parameters.values() if first is None and not p.is_inference()]
        now = [(parameter._version, parameter.grad is None) for parameter in parameters]
        if reference in self._called:
            then = self._called[reference]
            # A parameter was updated, or its gradient was set to None.
            changed = then is None or any(map(operator.gt, now, then))
            if changed or first or not reference.module.training:
                self._end_step()
                self._called.clear()
                self.step += 1
        self._called[reference] = now
        turn = (self.step - 1) // self._options.steps
        layers = self._options.layers or len(self.references)
        if turn * layers >= len(self.references):
            self.finish()
        return bool(self.references.index(reference) // layers == turn)

    def compare(self, subject: Subject, graphed: Any, eager: Any, again: Any, text: str = "") -> None:
        """Compare the value of a graph with an eager run, and the eager run with its repetition (``again``).

        A mismatch is described by ``text``, or by the relative error if ``text`` is empty.
        """
        if isinstance(graphed, torch.Tensor) and isinstance(eager, torch.Tensor):
            noise = relative_error(again, eager)
            self._noise[subject.kind] = torch.maximum(noise, self._noise.get(subject.kind, noise))
            self._pending.append((relative_error(graphed, eager), subject, text))
        elif graphed is not eager:
            self._pending.append((1.0, subject, UNEQUAL.get(graphed, "is not expected")))

    def leave_out(self, index: int, reference: Any) -> None:
        """Count a callable as not compared. Print each reason once for all modules of a class."""
        self.totals["left out"] += self.is_new(("left out", index))
        if self.is_new((reference.name, reference.refusal)):
            names = f"callable {index} and others of class {reference.name}"
            print_line(f"{names} are not compared: {reference.refusal}")

    def is_new(self, key: object) -> bool:
        new = key not in self._printed
        self._printed.add(key)
        return new

    def _end_step(self) -> None:
        """Read the results of this step, and print mismatches. In a strict check, a mismatch ends the process."""
        if torch.distributed.is_initialized():
            store = distributed_c10d._get_default_store()
            self._job = store, torch.distributed.get_rank(), torch.distributed.get_world_size()
        if self._pending:
            self.totals["steps"] = self.step
            _ = self._fixes  # The summary names the fixes of the checked steps, even if the job changes them later.
        self._leave_out_changed()
        groups: defaultdict[tuple[str, bool], list[tuple[float, Subject, str]]] = defaultdict(list)
        for error, subject, text in self._pending:
            if subject.reference.refusal:
                continue
            error, noise = float(error), float(self._noise.get(subject.kind, 0.0))
            different = error > NOISE_FACTOR * noise and noise < MAX_NOISE
            self.totals += Counter(
                tensors=1, callables=self.is_new(subject.callable), noisy=noise > 0, different=different
            )
            if (different or noise) and self.is_new((subject.kind, different)):
                groups[PARAMETER.sub("", subject.kind), different].append((error, subject, text))
        self._pending = []
        for (_, different), alike in groups.items():
            self._print_mismatch(different, alike)
        if self._options.strict and self.totals["different"]:
            text = _summary([self.totals], [self._fixes])
            print_stderr(f"{text}; strict check of rank {self._job[1]}, ending with status {EXIT_MISMATCH}")
            with contextlib.suppress(OSError):
                print(end="", flush=True)  # does nothing if stdout is closed
            os._exit(EXIT_MISMATCH)

    def _leave_out_changed(self) -> None:
        """Leave out the modules whose eager runs changed tensors of the job."""
        for reference in self.references:
            names = list(dict.fromkeys(name for name, error in reference.changes if float(error) > 0))
            if names and not reference.refusal:
                changed = f"{', '.join(names[:3])}{', ...' * (len(names) > 3)}"
                reference.refusal = f"its eager run changed {changed}, which the check restored"
                for index in reference.callables:
                    self.leave_out(index, reference)
            reference.changes = []

    def _print_mismatch(self, different: bool, alike: list[tuple[float, Subject, str]]) -> None:
        """Print the largest error of comparisons whose texts differ only in the parameter's name."""
        error, subject, text = max(alike, key=operator.itemgetter(0))
        difference = text or f"differs from the eager run (relative error {error:.3g})"
        line = f"step {subject.step}, callable {subject.callable} {subject.kind} {difference}"
        if noise := float(self._noise.get(subject.kind, 0.0)):
            line += f", but is not reproducible: two eager runs differ (relative error {noise:.3g})"
        others = [name for _, other, _ in alike if other is not subject for name in PARAMETER.findall(other.kind)]
        if others:
            line += f" ({len(others)} more like it: {', '.join(others[:3])}{', ...' * (len(others) > 3)})"
        if different:
            fixes = self._likely_fixes(subject)
            line += f"; likely cause: {' or '.join(fixes)}" if fixes else ""
            self.mismatches.append(line)
        print_line(line)

    def _likely_fixes(self, subject: Subject) -> list[str]:
        words = {*re.findall(r"[\w.]+", subject.kind.split(" is ")[-1]), *subject.reference.kinds}
        hinted = [fix for fix in self._unapplied_fixes if any(words.issuperset(x.split()) for x in fix.check_hints)]
        return [fix.id for fix in hinted]

    @functools.cached_property
    def _fixes(self) -> tuple[str, str]:
        """The state of the fixes (``on``, ``off``, or for example ``30 of 34``), and the digest of the report."""
        found = report()
        active, number = len(found.active), len(found.active) + len(found.missing) + len(found.having(Status.DISABLED))
        if found.mode == "off":
            return "off", found.digest
        return "on" if active == number else f"{active} of {number}", found.digest

    @functools.cached_property
    def _unapplied_fixes(self) -> list[Fix]:
        """The fixes that this TransformerEngine needs but that are not applied, or [] if none is missing."""
        found = read(Source.installed()).assessments
        needed = [fix for fix, assessment in found.items() if assessment.verdict == Verdict.APPLICABLE]
        return [CATALOGUE[fix] for fix in needed if fix not in report().active]

    def finish(self) -> "Check":
        """End the check and release its references. Rank 0 reports for the job when all ranks have finished."""
        if self.finished:
            return self
        self.finished = True
        self._hook.remove()
        self.lifetimes.undo.close()
        self._end_step()
        numbers = [number for each in self.references if not each.refusal for number in each.callables]
        self.totals["not reached"] = sum(number not in self._printed for number in numbers)
        for reference in self.references:
            reference.own.clear()
        if self._job[2] > 1 and threading.main_thread().is_alive():
            threading.Thread(target=self._report).start()  # The job continues, so a thread waits for the ranks.
        else:
            self._report()
        return self

    def _report(self) -> None:
        """Send the totals through the store to rank 0, which reports them.

        Ranks end at different times, so a collective could hang.
        """
        store, number, size = self._job
        if self._is_child and size == 1 and not self.totals["callables"]:
            return  # This process is a helper of the job, such as a writer of checkpoints.
        keys = [f"{self._name}/{rank}" for rank in range(size)]
        try:
            store.set(keys[number], json.dumps([self.totals, self._fixes]))
            while number == 0 and threading.main_thread().is_alive() and not store.check(keys):
                time.sleep(0.2)
            if number == 0:
                ended = hasattr(sys, "last_value")  # An exception has ended the process.
                store.wait(keys, timedelta(seconds=0.01 if ended else RANK_TIMEOUT_S))
                print_stderr(f"te-graph-fixes check: not covered: {NOT_COVERED} (docs/check.md)")
                ranks = [json.loads(store.get(key)) for key in keys]
                print_stderr(_summary([Counter(totals) for totals, _ in ranks], [tuple(fixes) for _, fixes in ranks]))
        except Exception as error:  # For example, the process with the store has ended.
            text = _summary([self.totals], [self._fixes])
            reason = f"because the ranks could not exchange their counts: {error}"
            print_stderr(f"{text}; this counts only rank {number}, {reason}")


def _summary(totals: list[Counter[str]], fixes: list[tuple[str, str]]) -> str:
    """Return the last line of a check: the number of mismatches, or an error if the fixes of the ranks differ."""
    if len(set(fixes)) == 1:
        return f"te-graph-fixes check, fixes {fixes[0][0]}: {_sentence(totals)}"
    ranks = by_value(dict(enumerate(fixes)))
    states = [f"fixes {found} (digest {digest}) on {numbered_ranks(ranks)}" for (found, digest), ranks in ranks.items()]
    text, _, _ = _sentence(totals).partition(":")
    error = f"the ranks differ in their fixes, so the result is not valid: {', '.join(states)}"
    return f"te-graph-fixes check, error: {error}; {text}"


def _sentence(totals: list[Counter[str]]) -> str:
    """Return the summary of a check: the numbers of comparisons and mismatches on all ranks."""
    total, steps = sum(totals, Counter[str]()), max(counts["steps"] for counts in totals)
    numbers = {"step": steps, "callable": total["callables"], "tensor": total["tensors"]}
    scope = ", ".join(count(number, noun) for noun, number in numbers.items())
    verdict = f"{total['different']:,} differ" if total["different"] else "all equal"
    if len(totals) > 1:
        scope += f" on {len(totals)} ranks"
        ranks = [str(rank) for rank, counts in enumerate(totals) if counts["different"]]
        verdict += f", on rank {', '.join(ranks)}" if ranks else ""
    if not total["tensors"]:
        verdict = "nothing was compared"
        if not total["left out"]:
            verdict += ", as no graph of TransformerEngine's make_graphed_callables was replayed"
    if total["noisy"]:
        verdict += f", except {total['noisy']:,} that two eager runs do not reproduce"
    if total["left out"]:
        verdict += f"; {count(total['left out'], 'callable')} left out"
    if total["not reached"]:
        verdict += f"; {count(total['not reached'], 'callable')} not reached"
    if steps == 1:
        verdict += "; one step cannot reveal stale weights: check at least 2"
    return f"{scope}: {verdict}"
