"""The comparisons, their mismatches, and the report. Nothing here waits for the GPU within a step.

A comparison leaves a number on the GPU, and they are read together when a step is over. A check that stopped the host
after each replay would hide what happens only where nobody waits.
"""

from __future__ import annotations

import atexit
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
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import wrapt
from torch.distributed import distributed_c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..activation import report
from ..decision import verdicts
from ..fix import Fix
from ..fixes import CATALOGUE
from ..patching.source import Source
from ..status import Status
from . import DIFFERENT, Options
from .difference import off_by

NOISE = 8  # a mismatch is more than so many times what two eager runs differ by, which is named in any case
ANYTHING = 0.1  # of the norm: where two eager runs differ by more, as in memory that nothing has written, none is told
PATIENCE = 60  # seconds that rank 0 waits for the other ranks at the end of its process
ONE_SIDED = {None: "is missing", False: "is not set", True: "is set"}
"""How a graph differs from the eager run, by the graph's value: a missing tensor, or a mark of a parameter."""
PARAMETER = re.compile(r"(?<=grad of )[\w.]+")  # in the kind of a `Subject`
UNSEEN = "failed captures, modules without graphs, the order in which ranks run hooks, races between streams"
_numbers = itertools.count()  # the same on all ranks


def say(text: str, of_rank: bool = True) -> None:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else int(os.environ.get("RANK", "0"))
    print(f"te-graph-fixes check: {f'rank {rank}, ' * of_rank}{text}", file=sys.stderr, flush=True)


class Subject(NamedTuple):
    """A tensor of a callable in a step. Of each kind, such as ``(Linear), forward: output 0``, one is reported."""

    step: int
    callable: int
    kind: str
    twin: Any


class Check:
    """The check of this process: whose turn it is, what has been compared, and the report of it."""

    def __init__(self, options: Options) -> None:
        self.totals: Counter[str] = Counter()
        self.mismatches: list[str] = []
        self.twins: list[Any] = []
        self.lifetimes = Lifetimes(self)
        self.numbers = itertools.count()  # of callables
        self.step, self.finished, self._options = 1, False, options
        self._called: dict[Any, Any] = {}  # twins, in this step: their parameters then; None after an optimizer's step
        self._pending: list[tuple[torch.Tensor | float, Subject, str]] = []
        self._changes: list[tuple[torch.Tensor | float, int, Any, str]] = []
        self._noise: dict[str, torch.Tensor] = {}  # by kind, the most that two eager runs have differed by
        self._said: set[object] = set()
        self._job: tuple[Any, int, int] = torch.distributed.HashStore(), 0, 1
        self._name = f"te_graph_fixes/check {next(_numbers)}"
        self._hook = register_optimizer_step_post_hook(lambda *_: self._called.update(dict.fromkeys(self._called)))
        atexit.register(self.finish)

    def enter(self, twin: Any, first: bool | None) -> bool:
        """A callable of ``twin`` is called, which may begin a step; whether it is to be compared.

        ``first`` is its ``is_first_microbatch``; where that is None its parameters tell where a step begins.
        """
        parameters = [p for p in twin.parameters.values() if first is None and not p.is_inference()]
        now = [(parameter._version, parameter.grad is None) for parameter in parameters]
        if twin in self._called:
            then = self._called[twin]
            changed = then is None or any(map(operator.gt, now, then))  # written into, or without a gradient again
            if changed or first or not twin.module.training:
                self._step_over()
                self._called.clear()
                self.step += 1
        self._called[twin] = now
        turn = (self.step - 1) // self._options.steps
        layers = self._options.layers or len(self.twins)
        if turn * layers >= len(self.twins):
            self.finish()
        return bool(self.twins.index(twin) // layers == turn)

    def compare(self, subject: Subject, graphed: Any, eager: Any, again: Any, text: str = "") -> None:
        """Compare a tensor of the graph with that of eager, and that with what eager has computed ``again``."""
        if isinstance(graphed, torch.Tensor) and isinstance(eager, torch.Tensor):
            noise = off_by(again, eager)
            self._noise[subject.kind] = torch.maximum(noise, self._noise.get(subject.kind, noise))
            self._pending.append((off_by(graphed, eager), subject, text))
        elif graphed is not eager:
            self._pending.append((1.0, subject, ONE_SIDED.get(graphed, "is not expected")))

    def note_changes(self, index: int, twin: Any) -> None:
        """Keep how much the eager runs of ``twin`` had changed of the job until the end of the step."""
        self._changes += [(error, index, twin, name) for name, error in twin.changes]
        twin.changes = []

    def leave_out(self, index: int, module: str, reason: str) -> None:
        self.totals["left out"] += self.new(("left out", index))
        if self.new((module, reason)):
            say(f"callable {index} ({module}) is not compared, nor are others like it: {reason}")

    def new(self, key: object) -> bool:
        """Whether this is asked for the first time."""
        new = key not in self._said
        self._said.add(key)
        return new

    def _step_over(self) -> None:
        """Read what has been compared in this step. A strict check ends the process here."""
        if torch.distributed.is_initialized():
            store = distributed_c10d._get_default_store()
            self._job = store, torch.distributed.get_rank(), torch.distributed.get_world_size()
        if self._pending:
            self.totals["steps"] = self.step
        self._report_changes()
        groups: defaultdict[tuple[str, bool], list[tuple[float, Subject, str]]] = defaultdict(list)
        for error, subject, text in self._pending:
            error, noise = float(error), float(self._noise.get(subject.kind, 0.0))
            different = error > NOISE * noise and noise < ANYTHING
            self.totals += Counter(
                tensors=1, callables=self.new(subject.callable), noisy=noise > 0, different=different
            )
            if (different or noise) and self.new((subject.kind, different)):
                groups[PARAMETER.sub("", subject.kind), different].append((error, subject, text))
        self._pending = []
        for (_, different), alike in groups.items():
            self._tell(different, alike)
        if self._options.strict and self.totals["different"]:
            say(f"which ends with status {DIFFERENT}: {_sentence([self.totals])}")
            sys.stdout.flush()
            os._exit(DIFFERENT)

    def _report_changes(self) -> None:
        """Report what the eager runs had changed of the job. Nothing else is reported of their modules."""
        changed: defaultdict[tuple[int, Any], list[str]] = defaultdict(list)
        for error, index, twin, name in self._changes:
            if float(error) > 0 and name not in changed[index, twin]:
                changed[index, twin].append(name)
        self._changes = []
        for (index, twin), names in changed.items():
            if names and not twin.refusal:
                more = f" and {len(names) - 3} more" * (len(names) > 3)
                twin.refusal = f"the check changed {', '.join(names[:3])}{more}"
                self.totals += Counter({"errors": 1, "left out": self.new(("left out", index))})
                self.new((twin.name, twin.refusal))
                say(f"error: callable {index} ({twin.name}) is not checked: {twin.refusal}, and restored it")
        self._pending = [each for each in self._pending if not each[1].twin.refusal]

    def _tell(self, different: bool, alike: list[tuple[float, Subject, str]]) -> None:
        """Say what is wrong with the worst of these tensors, which differ in the name of a parameter alone."""
        error, subject, text = max(alike, key=operator.itemgetter(0))
        difference = text or f"is off by {error:.3g} of its norm"
        line = f"step {subject.step}, callable {subject.callable} {subject.kind} {difference}"
        if noise := float(self._noise.get(subject.kind, 0.0)):
            line += f", but is not reproducible: two eager runs differ by {noise:.3g}"
        others = [name for _, other, _ in alike if other is not subject for name in PARAMETER.findall(other.kind)]
        if others:
            line += f" ({len(others)} more like it: {', '.join(others[:3])}{', ...' * (len(others) > 3)})"
        if different:
            fixes = self._hinted(subject)
            line += f"; looks like {' or '.join(fixes)}" if fixes else ""
            self.mismatches.append(line)
        say(line)

    def _hinted(self, subject: Subject) -> list[str]:
        words = {*re.findall(r"[\w.]+", subject.kind.split(" is ")[-1]), *subject.twin.kinds}
        return [fix.id for fix in self._open if any(words.issuperset(look.split()) for look in fix.check_hints)]

    @functools.cached_property
    def _open(self) -> list[Fix]:
        """The fixes that this TransformerEngine needs, and that are not applied."""
        needed = [fix for fix, verdict in verdicts(Source.installed()).items() if verdict.status == Status.APPLICABLE]
        return [CATALOGUE[fix] for fix in needed if fix not in report().having("applied")]

    def finish(self) -> Check:
        """The check is over: let go of everything. Rank 0 reports for the job, once all ranks are here."""
        if self.finished:
            return self
        self.finished = True
        self._hook.remove()
        self.lifetimes.undo.close()
        self._step_over()
        for twin in self.twins:
            twin.own.clear()
        others = self._job[2] > 1 and threading.main_thread().is_alive()  # which may take a while
        report = threading.Thread(target=self._report).start if others else self._report
        report()
        return self

    def _report(self) -> None:
        """Hand the totals to rank 0, which reports. A collective could lock up: ranks end at different times."""
        store, number, size = self._job
        keys = [f"{self._name}/{rank}" for rank in range(size)]
        try:
            store.set(keys[number], json.dumps(self.totals))
            while number == 0 and threading.main_thread().is_alive() and not store.check(keys):
                time.sleep(0.2)
            if number == 0:
                ended = hasattr(sys, "last_value")  # by an exception
                store.wait(keys, timedelta(seconds=0.01 if ended else PATIENCE))
                say(f"it does not see {UNSEEN} (docs/check.md)", of_rank=False)
                say(_sentence([Counter(json.loads(store.get(key))) for key in keys]), of_rank=False)
        except Exception as error:  # the process that holds the store has ended, for one
            say(f"{_sentence([self.totals])}; there is no report for all ranks: {error}")


def _sentence(totals: list[Counter[str]]) -> str:
    """The number of comparisons and of mismatches; ``totals`` are those of the ranks."""
    total, steps = sum(totals, Counter[str]()), max(counts["steps"] for counts in totals)
    amounts = (steps, "step"), (total["callables"], "callable")
    counted = [f"{number:,} {word}{'s' * (number != 1)}" for number, word in amounts]
    scope = ", ".join([*counted, f"{total['tensors']:,} tensors compared"])
    verdict = f"{total['different']:,} differ" if total["different"] else "all equal"
    if len(totals) > 1:
        scope += f" on {len(totals)} ranks"
        ranks = [str(rank) for rank, counts in enumerate(totals) if counts["different"]]
        verdict += f", on rank {', '.join(ranks)}" if ranks else ""
    if not total["tensors"]:
        verdict = "there was nothing to compare"
        if not total["left out"]:
            verdict += ", as no graph of TransformerEngine's make_graphed_callables has been replayed"
    if total["noisy"]:
        verdict += f", but for {total['noisy']:,} that eager itself does not reproduce"
    if total["errors"]:
        verdict += f"; {total['errors']:,} errors: the check changed something, and restored it"
    if total["left out"]:
        verdict += f"; {total['left out']:,} callables are left out"
    if steps == 1:
        verdict += "; one step cannot show weights that are stale after an optimizer step: check 2"
    return f"{scope}: {verdict}"


class Lifetimes:
    """Tensors in graph memory that are in use, and whether a replay writes into them meanwhile.

    In use is what somebody surely reads: the ``.grad`` of a parameter that has taken over the memory of a graph, and
    what is being sent, until the program waits for it. Sends are seen in the process group, as torch compares `isend`
    by identity.
    """

    def __init__(self, check: Check) -> None:
        self._check = check
        self.returned: dict[int, Subject] = {}  # by address; the ``.grad`` of a parameter may lie there now
        self._batch: list[tuple[Subject, torch.Tensor]] = []  # sent without a handle: the end of the batch gives one
        self._sends: WeakKeyDictionary[Any, tuple[Any, list[tuple[Subject, torch.Tensor]]]] = WeakKeyDictionary()
        """By handle, the receiver and what is sent, in the order of the sends."""
        self._sums: list[tuple[Subject, torch.Tensor, torch.Tensor]] = []
        self.undo = ExitStack()
        for name in ("Work.wait", "ProcessGroup.send", "ProcessGroup._end_coalescing"):
            self.undo.callback(setattr, *wrapt.resolve_path(distributed_c10d, name))
            wrapt.wrap_function_wrapper(distributed_c10d, name, self._wait if name == "Work.wait" else self._send)

    def before_replay(self) -> None:
        """Begin to watch what is in use: the program itself may have written into it before."""
        used = [pair for _, sent in self._sends.values() for pair in sent]
        for address, subject in self.returned.items():
            parameter = subject.twin.parameters.get("".join(PARAMETER.findall(subject.kind)))
            if (grad := getattr(parameter, "grad", None)) is not None and grad.data_ptr() == address:
                used.append((subject._replace(kind=f"{subject.kind} is in use and overwritten"), grad))
        self._sums = [(subject, tensor, tensor.sum(dtype=torch.float64)) for subject, tensor in used]

    def after_replay(self, by: str) -> None:
        for subject, tensor, total in self._sums:
            self._check.compare(subject, tensor.sum(dtype=torch.float64), total, total, f"by {by}")
        self._sums = []

    def _send(self, send: Any, group: Any, args: Any, kwargs: Any) -> Any:
        """Send tensors; or end a batch, all of which has one handle."""
        work = send(*args, **kwargs)
        for tensor in args[0] if isinstance(args[0], list) else ():
            if subject := self.returned.get(tensor.data_ptr()):
                subject = subject._replace(kind=f"{subject.kind} is being sent and overwritten")
                self._batch.append((subject, tensor.detach()))
        if work is not None:
            self._sends[work], self._batch = ((group, args[1:2]), self._batch), []
        return work

    def _wait(self, wait: Any, work: Any, args: Any, kwargs: Any) -> Any:
        """Wait for a send, and with it for the earlier ones to the same rank: they go in order."""
        result = wait(*args, **kwargs)
        if work in self._sends:
            handles, (receiver, _) = list(self._sends), self._sends[work]
            for handle in handles[: handles.index(work) + 1]:
                if self._sends[handle][0] == receiver:
                    del self._sends[handle]
        return result
