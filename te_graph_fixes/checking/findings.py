"""What has been compared, what differs, and the report. Nothing here waits for the GPU within a step.

A comparison leaves three numbers on the GPU, and they are read together when a step is over. A check that stopped the
host after each replay would hide what happens only where nobody waits.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import DIFFERENT

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


def measure(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Elements that differ (NaN equals NaN), and squared norms of the difference and of what is wanted."""
    tensors = [each.dequantize() if hasattr(each, "_quantizer") else each for each in (found, wanted)]
    total = torch.zeros(3, dtype=torch.float64, device=found.device)
    if found.shape != wanted.shape:
        return total + math.inf
    for a, b in zip(*(each.detach().reshape(-1).split(CHUNK) for each in tensors), strict=True):
        unequal = ((a != b) & ~(a.isnan() & b.isnan())).sum()
        a, b = a.double(), b.double()
        total += torch.stack((unequal.double(), (a - b).square().sum(), b.square().sum()))
    return total


def _error(numbers: Sequence[float]) -> float:
    """The norm of the difference over the norm of what is wanted; 0.0 is bit for bit."""
    unequal, difference, norm = numbers
    if not unequal:
        return 0.0
    return (math.sqrt(difference / norm) if norm and math.isfinite(difference) else 0.0) or math.inf


def rank() -> int:
    """The number of this process in the job."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    return int(os.environ.get("RANK", "0"))


def say(text: str) -> None:
    print(f"te-graph-fixes check: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Place:
    """A tensor that is compared. ``kinds`` are the classes in the module; ``symptom`` is what a difference looks like.

    Of a mismatch, ``text`` says what was found, and ``looks_like`` are fixes of the catalogue that this
    TransformerEngine needs and that are not applied.
    """

    callable: int
    module: str
    kinds: frozenset[str]
    fp8: bool
    step: int
    when: str
    tensor: str
    symptom: str = ""
    text: str = ""
    looks_like: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, ...]:
        """The same for all callables of a kind."""
        return self.module, self.when, self.tensor

    def __str__(self) -> str:
        where = f"rank {rank()}, step {self.step}, callable {self.callable} ({self.module}), {self.when}"
        hint = f"; looks like {' or '.join(self.looks_like)}" if self.looks_like else ""
        return f"{where}: {self.tensor} {self.text}{hint}"


class Findings:
    """The comparisons of this process. ``totals`` counts them for the report."""

    _made = 0

    def __init__(self, strict: bool) -> None:
        self.totals: Counter[str] = Counter()
        self.mismatches: list[Place] = []
        self.finished = False
        self._strict = strict
        self._pending: list[tuple[Place, torch.Tensor]] = []
        self._noise: dict[tuple[str, ...], float] = {}
        self._said: set[tuple[str, ...]] = set()
        self._callables: set[int] = set()
        self._open: list[Any] | None = None
        self._job: tuple[Any, int] | None = None
        self._report: threading.Thread | None = None
        Findings._made += 1  # the same on all ranks
        self._name = f"te_graph_fixes/check {self._made}"
        atexit.register(self._end)

    def compare(self, place: Place, found: Any, eager: Any) -> None:
        """Compare a tensor of the graph with that of eager; without a symptom in ``place``, two of eager."""
        if found is not None and eager is not None:
            self._add(place, measure(found, eager))
        elif found is not eager and place.symptom:
            self.wrong(replace(place, text="is missing" if found is None else "is not expected"))

    def wrong(self, place: Place, really: torch.Tensor | None = None) -> None:
        """Something that a graph does otherwise, without a number for it; unless ``really`` is False on the GPU."""
        one = torch.ones(3, dtype=torch.float64, device=None if really is None else really.device)
        self._add(place, one if really is None else one * really)

    def leave_out(self, index: int, module: str, reason: str) -> None:
        """The callable ``index`` is not compared."""
        if self._new("left out", str(index)):
            self.totals["left out"] += 1
            if self._new(module, reason):
                say(f"rank {rank()}, callable {index} ({module}) is not compared, nor are others like it: {reason}")

    def step_over(self) -> None:
        """Read what has been compared so far. A strict check ends the process here."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            store = torch.distributed.distributed_c10d._get_default_store()
            self._job = store, torch.distributed.get_world_size()
        pending, self._pending = self._pending, []
        numbers = torch.stack([each.to(pending[0][1].device) for _, each in pending]).tolist() if pending else []
        read = [(place, _error(each)) for (place, _), each in zip(pending, numbers, strict=True)]
        for place, error in read:
            if not place.symptom:
                self._noise[place.key] = max(self._noise.get(place.key, 0.0), error)
        for place, error in read:
            if place.symptom:
                self._judge(place, error)
        if self._strict and self.totals["different"]:
            say(f"rank {rank()} ends with status {DIFFERENT}: {_sentence([self.totals])}")
            sys.stdout.flush()
            os._exit(DIFFERENT)

    def finish(self) -> None:
        """The check is over: rank 0 reports for the job, once all ranks are here."""
        if self.finished:
            return
        self.finished = True
        self.step_over()
        if self._job is None or self._job[1] == 1:
            _conclude([self.totals])
        else:
            self._report = threading.Thread(target=self._report_job, args=(*self._job, rank()), daemon=True)
            self._report.start()

    def _add(self, place: Place, numbers: torch.Tensor) -> None:
        self._pending.append((place, numbers))
        if place.symptom:
            self._callables.add(place.callable)
            self.totals["callables"] = len(self._callables)
            self.totals["steps"] = max(self.totals["steps"], place.step)
            self.totals["tensors"] += 1

    def _judge(self, place: Place, error: float) -> None:
        noise = self._noise.get(place.key, 0.0)
        place = replace(place, text=place.text or f"is off by {error:.3g} of its norm")
        if noise:
            self.totals["noisy"] += 1
            text = f"{place.text}, where two eager runs differ by {noise:.3g}"
            if self._new(*place.key):
                say(f"{replace(place, text='is not reproducible')}: the graph's {text}")
            place = replace(place, text=text)
        if error <= NOISE * noise:
            return
        self.totals["different"] += 1
        if self._new(*place.key, place.symptom):
            self.mismatches.append(replace(place, looks_like=tuple(self._hints(place))))
            if len(self.mismatches) <= LINES:
                more = "" if len(self.mismatches) < LINES else " (further mismatches are counted only)"
                say(f"{self.mismatches[-1]}{more}")

    def _new(self, *key: str) -> bool:
        new = key not in self._said
        self._said.add(key)
        return new

    def _hints(self, place: Place) -> Iterator[str]:
        """The fixes of defects that look like this, that this TransformerEngine needs, and that are not applied."""
        from .. import report
        from ..fix import APPLICABLE
        from ..fixes import CATALOGUE
        from ..source import Source
        from ..verdicts import verdicts

        if self._open is None:
            found, applied = verdicts(Source.installed()), report().fixes
            self._open = [
                fix
                for fix in CATALOGUE.values()
                if found[fix.id].verdict == APPLICABLE and applied[fix.id].status != "applied"
            ]
        for fix in self._open:
            looks = [look.partition(" of ") for look in fix.looks_like]
            kinds = {kind for what, _, kind in looks if what in (place.symptom, place.fp8 and f"fp8 {place.symptom}")}
            if kinds & (place.kinds | {""}):
                yield fix.id

    def _report_job(self, store: Any, size: int, number: int) -> None:
        """Hand the totals to rank 0, which reports. A collective could lock up: ranks end at different times."""
        keys = [f"{self._name}/{each}" for each in range(size)]
        try:
            store.set(keys[number], json.dumps(self.totals))
            if number == 0:
                while not store.check(keys):
                    time.sleep(0.2)
                _conclude([Counter(json.loads(store.get(key))) for key in keys])
        except Exception as error:  # the process that holds the store has ended, for one
            say(f"rank {number}: {_sentence([self.totals])}; there is no report for all ranks: {error}")

    def _end(self) -> None:
        """At the end of the process, which may have had fewer steps than were to be checked."""
        try:
            self.finish()
        except Exception as error:
            say(f"the last comparisons could not be read: {type(error).__name__}: {error}")
        if self._report is not None:
            self._report.join(PATIENCE)
            if self._report.is_alive():
                say(f"rank {rank()}: {_sentence([self.totals])}; there is no report for all ranks: some have sent none")


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


def _conclude(totals: Sequence[Counter[str]]) -> None:
    say(f"it does not see {UNSEEN} (docs/check.md)")
    say(_sentence(totals))
