"""What has been compared, what differs, and the report. Nothing here waits for the GPU within a step.

A comparison leaves a few numbers on the GPU, and they are read together when a step is over. A check that stopped the
host after each replay would hide what happens only where nobody waits.
"""

from __future__ import annotations

import atexit
import itertools
import json
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import DIFFERENT, Options

CHUNK = 1 << 22
"""Elements that are compared at a time; some 32 bytes of memory for each."""
NOISE = 8
"""What eager does not reproduce is a mismatch only where graph and eager differ by more than so many times what two
eager runs differ by. It is named in any case, with both numbers."""
LINES = 25
"""Mismatches that a rank prints; it counts the rest."""
PATIENCE = 60
"""Seconds that rank 0 waits for the other ranks at the end of its process."""
UNSEEN = "failed captures, modules without graphs, the order in which ranks run hooks, races between streams"


def measure(found: torch.Tensor, *wanted: torch.Tensor) -> torch.Tensor:
    """Three numbers: elements that differ (NaN equals NaN), and squared norms of the difference and of what is wanted.

    That is the first of ``wanted`` less the second, if there is one.
    """
    tensors = [each.dequantize() if hasattr(each, "_quantizer") else each for each in (found, *wanted)]
    total = torch.zeros(3, dtype=torch.float64, device=found.device)
    if found.shape != wanted[0].shape:
        return total + math.inf
    for a, b, *less in zip(*(each.detach().reshape(-1).split(CHUNK) for each in tensors), strict=True):
        unequal = ((a != b) & ~(a.isnan() & b.isnan())).sum()
        a, b = a.double(), b.double() - (less[0].double() if less else 0)
        total += torch.stack((unequal.double(), (a - b).square().sum(), b.square().sum()))
    return total


def _error(numbers: Sequence[float]) -> float:
    """The norm of the difference over the norm of what is wanted; 0.0 is bit for bit."""
    unequal, difference, norm = numbers
    if not unequal:
        return 0.0
    return math.sqrt(difference / norm) if norm and math.isfinite(difference) else math.inf


def ranks() -> tuple[int, int]:
    """The number of this process in the job, and how many there are."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), 1


def say(text: str) -> None:
    print(f"te-graph-fixes check: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Place:
    """Where something was compared. ``kinds`` are the names of the classes in the module, ``fp8`` says what it uses."""

    callable: int
    module: str
    step: int
    when: str
    tensor: str
    kinds: frozenset[str] = frozenset()
    fp8: bool = False

    @property
    def key(self) -> tuple[str, ...]:
        """The same for all callables of a kind."""
        return self.module, self.when, self.tensor

    def __str__(self) -> str:
        where = f"rank {ranks()[0]}, step {self.step}, callable {self.callable} ({self.module})"
        return f"{where}, {self.when}: {self.tensor}"


@dataclass(frozen=True)
class Mismatch:
    """The first tensor of its kind that a graph computes otherwise than eager.

    ``looks_like`` are fixes of the catalogue that this TransformerEngine needs and that are not applied.
    """

    place: Place
    text: str
    looks_like: tuple[str, ...]

    def __str__(self) -> str:
        hint = f"; looks like {' or '.join(self.looks_like)}" if self.looks_like else ""
        return f"{self.place} {self.text}{hint}"


class Findings:
    """The comparisons of this process. ``totals`` counts them for the report."""

    _numbers = itertools.count()

    def __init__(self, options: Options) -> None:
        self.options, self._number = options, next(self._numbers)
        self.totals: Counter[str] = Counter()
        self.mismatches: list[Mismatch] = []
        self.finished = False
        self._pending: list[tuple[torch.Tensor, Place, tuple[str, ...]]] = []
        self._noise: dict[tuple[str, ...], float] = {}
        self._said: set[tuple[str, ...]] = set()
        self._callables: set[int] = set()
        self._open: list[Any] | None = None
        self._job: threading.Thread | None = None
        atexit.register(self._end)

    def noise(self, place: Place, once: Any, again: Any) -> None:
        """The same tensor of two eager runs."""
        if once is not None and again is not None:
            self._pending.append((measure(again, once), place, ()))

    def compare(self, place: Place, found: Any, eager: Any, less: Any, symptoms: tuple[str, ...]) -> None:
        """Compare a tensor of the graph with that of eager.

        ``symptoms`` are what a difference looks like, and what it does where the graph has eager's without ``less``.
        """
        if found is None or eager is None:
            if found is not eager:
                self.wrong(place, symptoms[-1], "is missing" if found is None else "is not expected")
            return
        numbers = measure(found, eager)
        self._count(place, numbers if less is None else torch.cat((numbers, measure(found, eager, less))), symptoms)

    def overwritten(self, place: Place, changed: torch.Tensor, symptom: str, text: str) -> None:
        """``changed``: whether somebody has written into a tensor that is in use."""
        self._count(place, changed.double().reshape(1), (symptom, text))

    def wrong(self, place: Place, symptom: str, text: str) -> None:
        """Something that a graph does otherwise, without a number for it."""
        self._count(place, torch.ones(1, dtype=torch.float64), (symptom, text))

    def leave_out(self, index: int, module: str, reason: str) -> None:
        """The callable ``index`` is not compared."""
        if self._new("left out", str(index)):
            self.totals["left out"] += 1
            if self._new(module, reason):
                say(f"rank {ranks()[0]}, callable {index} ({module}) is not compared, nor are others like it: {reason}")

    def step_over(self) -> None:
        """Read what has been compared so far. A strict check ends the process here."""
        pending, self._pending = self._pending, []
        flat = iter(torch.cat([each.to(pending[0][0].device) for each, _, _ in pending]).tolist() if pending else ())
        read = [(list(itertools.islice(flat, len(each))), place, symptoms) for each, place, symptoms in pending]
        for numbers, place, symptoms in read:
            if not symptoms:
                self._noise[place.key] = max(self._noise.get(place.key, 0.0), _error(numbers))
        for numbers, place, symptoms in read:
            if symptoms:
                self._judge(numbers, place, symptoms)
        if self.options.strict and self.totals["different"]:
            say(f"rank {ranks()[0]} ends with status {DIFFERENT}: {_sentence([self.totals])}")
            sys.stdout.flush()
            os._exit(DIFFERENT)

    def finish(self) -> None:
        """The check is over: rank 0 reports for the job, once all ranks are here."""
        if self.finished:
            return
        self.finished = True
        self.step_over()
        number, size = ranks()
        if size == 1:
            _report([self.totals])
            return
        store = torch.distributed.distributed_c10d._get_default_store()
        keys = [f"te_graph_fixes/check {self._number}/{each}" for each in range(size)]
        self._job = threading.Thread(target=_report_job, args=(self.totals, store, number, keys), daemon=True)
        self._job.start()

    def _count(self, place: Place, numbers: torch.Tensor, symptoms: tuple[str, ...]) -> None:
        self._callables.add(place.callable)
        self.totals["callables"] = len(self._callables)
        self.totals["steps"] = max(self.totals["steps"], place.step)
        self.totals["tensors"] += 1
        self._pending.append((numbers, place, symptoms))

    def _judge(self, numbers: list[float], place: Place, symptoms: tuple[str, ...]) -> None:
        symptom, text = symptoms[0], symptoms[-1]
        if len(numbers) > 1:
            error, noise = _error(numbers[:3]), self._noise.get(place.key, 0.0)
            text = f"is off by {error:.3g} of its norm"
            if noise:
                self.totals["noisy"] += 1
                text += f", where two eager runs differ by {noise:.3g}"
                if self._new(*place.key):
                    say(f"{place} is not reproducible: the graph's {text}")
            if error <= NOISE * noise:
                return
            if numbers[3:] and _error(numbers[3:]) < 0.1 * error:
                symptom = symptoms[1]
        elif not numbers[0]:
            return
        self.totals["different"] += 1
        if self._new(*place.key, symptom):
            self.mismatches.append(Mismatch(place, text, tuple(self._hints(place, symptom))))
            if len(self.mismatches) <= LINES:
                more = "" if len(self.mismatches) < LINES else " (further mismatches are counted only)"
                say(f"{self.mismatches[-1]}{more}")

    def _new(self, *key: str) -> bool:
        new = key not in self._said
        self._said.add(key)
        return new

    def _hints(self, place: Place, symptom: str) -> Iterator[str]:
        """The fixes of defects that look like this, that this TransformerEngine needs, and that are not applied."""
        from .. import report
        from ..fix import APPLICABLE
        from ..fixes import CATALOGUE
        from ..source import Source
        from ..verdicts import verdicts

        if self._open is None:
            found, applied = verdicts(Source.installed()), report().fixes
            self._open = [fix for fix in CATALOGUE.values() if found[fix.id].verdict == APPLICABLE]
            self._open = [fix for fix in self._open if applied[fix.id].status != "applied"]
        for fix in self._open:
            looks = [look.partition(" of ") for look in fix.looks_like]
            kinds = {kind for what, _, kind in looks if what == symptom or (place.fp8 and what == f"fp8 {symptom}")}
            if kinds & (place.kinds | {""}):
                yield fix.id

    def _end(self) -> None:
        """At the end of the process, which may have had fewer steps than were to be checked."""
        try:
            self.finish()
        except Exception as error:
            say(f"the last comparisons could not be read: {type(error).__name__}: {error}")
        if self._job is not None:
            self._job.join(PATIENCE)


def _sentence(totals: Sequence[Counter[str]]) -> str:
    total = sum(totals, Counter[str]())
    where, steps = f" on {len(totals)} ranks" if len(totals) > 1 else "", max(each["steps"] for each in totals)
    text = f"{steps} steps, {total['callables']:,} callables, {total['tensors']:,} tensors compared{where}: "
    if total["different"]:
        text += f"{total['different']:,} differ"
        text += f", on rank {', '.join(str(i) for i, each in enumerate(totals) if each['different'])}" if where else ""
    else:
        text += "all equal" if total["tensors"] else "there was nothing to compare"
    text += f", but for {total['noisy']:,} that eager itself does not reproduce" if total["noisy"] else ""
    return text + (f"; {total['left out']:,} callables are left out" if total["left out"] else "")


def _report(totals: Sequence[Counter[str]]) -> None:
    say(f"it does not see {UNSEEN} (docs/check.md)")
    say(_sentence(totals))


def _report_job(own: Counter[str], store: Any, number: int, keys: list[str]) -> None:
    """Hand the totals of this rank to rank 0, which reports. A collective could lock up: ranks end at other times."""
    try:
        store.set(keys[number], json.dumps(own))
        if number == 0:
            while not store.check(keys):
                time.sleep(0.2)
            _report([Counter(json.loads(store.get(key))) for key in keys])
    except RuntimeError as error:  # the process that holds the store has ended
        say(f"rank {number}: {_sentence([own])}; there is no report for all ranks: {error}")
