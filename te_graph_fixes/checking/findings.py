"""What has been compared, what differs, and the report. Nothing here waits for the GPU within a step.

A comparison leaves a number on the GPU, and they are read together when a step is over. A check that stopped the host
after each replay would hide what happens only where nobody waits.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import math
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..activation import report
from ..fix import APPLICABLE, Fix
from ..fixes import CATALOGUE
from ..source import Source
from ..verdicts import verdicts
from . import DIFFERENT

CHUNK = 1 << 22
"""Elements that are compared at a time; some 32 bytes of memory for each."""
NOISE = 8
"""What eager does not reproduce is a mismatch only where graph and eager differ by more than so many times what two
eager runs differ by. It is named in any case, with both numbers."""
PATIENCE = 60
"""Seconds that rank 0 waits for the other ranks at the end of its process."""
_numbers = itertools.count()  # the same on all ranks
UNSEEN = "failed captures, modules without graphs, the order in which ranks run hooks, races between streams"


def measure(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The norm of the difference over the norm of what is wanted; 0.0 is bit for bit, and NaN equals NaN."""
    tensors = [each.dequantize() if hasattr(each, "_quantizer") else each for each in (found, wanted)]
    total = torch.zeros(3, dtype=torch.float64, device=found.device)
    if found.shape != wanted.shape:
        return total[0] + math.inf
    for a, b in zip(*(each.detach().reshape(-1).split(CHUNK) for each in tensors), strict=True):
        unequal = ((a != b) & ~(a.isnan() & b.isnan())).sum()
        a, b = a.double(), b.double()
        total += torch.stack((unequal.double(), (a - b).square().sum(), b.square().sum()))
    unequal, difference, norm = total
    error = (difference / norm).sqrt()
    return torch.where(unequal > 0, torch.where(error > 0, error, math.inf), 0.0)


def rank() -> int:
    """The number of this process in the job."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else int(os.environ.get("RANK", "0"))


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

    def __init__(self, strict: bool) -> None:
        self.totals: Counter[str] = Counter()
        self.mismatches: list[Place] = []
        self.finished = False
        self._strict = strict
        self._pending: list[tuple[Place, torch.Tensor | bool, torch.Tensor | float]] = []
        self._noise: defaultdict[tuple[str, ...], float] = defaultdict(float)
        self._said: set[tuple[object, ...]] = set()
        self._job: tuple[Any, int, int] = torch.distributed.HashStore(), 0, 1
        self._name = f"te_graph_fixes/check {next(_numbers)}"
        self._reporter = threading.Thread(target=self._report, daemon=True)
        self._until = math.inf
        atexit.register(self._end)

    def compare(self, place: Place, found: Any, eager: Any, again: Any) -> None:
        """Compare a tensor of the graph with that of eager, and that with what eager has computed ``again``."""
        if found is not None and eager is not None:
            self.add(place, measure(found, eager), measure(again, eager))
        elif found is not eager:
            self.add(replace(place, text="is missing" if found is None else "is not expected"), True)

    def add(self, place: Place, error: torch.Tensor | bool, noise: torch.Tensor | float = 0.0) -> None:
        """How much a graph differs, and eager from itself; or, where ``place`` says what is wrong, whether it is."""
        self._pending.append((place, error, noise))
        self.totals["callables"] += self._new("callable", place.callable)
        self.totals["steps"] = max(self.totals["steps"], place.step)
        self.totals["tensors"] += 1

    def leave_out(self, index: int, module: str, reason: str) -> None:
        """The callable ``index`` is not compared."""
        if self._new("left out", index):
            self.totals["left out"] += 1
            if self._new(module, reason):
                say(f"rank {rank()}, callable {index} ({module}) is not compared, nor are others like it: {reason}")

    def say_once(self, text: str) -> None:
        if self._new(text):
            say(f"rank {rank()}: {text}")

    def step_over(self) -> None:
        """Read what has been compared so far. A strict check ends the process here."""
        if torch.distributed.is_initialized():
            store = torch.distributed.distributed_c10d._get_default_store()
            self._job = store, rank(), torch.distributed.get_world_size()
        pending, self._pending = [(place, float(error), float(noise)) for place, error, noise in self._pending], []
        for place, _, noise in pending:
            self._noise[place.key] = max(self._noise[place.key], noise)
        for place, error, _ in pending:
            self._judge(place, error)
        if self._strict and self.totals["different"]:
            say(f"rank {rank()} ends with status {DIFFERENT}: {_sentence([self.totals])}")
            sys.stdout.flush()
            os._exit(DIFFERENT)

    def finish(self) -> None:
        """The check is over: rank 0 reports for the job, once all ranks are here."""
        if not self.finished:
            self.finished = True
            self.step_over()
            waits = self._job[2] > 1 and self._until == math.inf
            (self._reporter.start if waits else self._reporter.run)()

    def _judge(self, place: Place, error: float) -> None:
        noise = self._noise[place.key]
        different = error > NOISE * noise
        self.totals += Counter(noisy=int(noise > 0), different=int(different))
        if (different or noise) and self._new(*place.key, place.symptom, different):
            text = place.text or f"is off by {error:.3g} of its norm"
            text += f", but is not reproducible: two eager runs differ by {noise:.3g}" if noise else ""
            looks = {f"{fp8}{place.symptom}" for fp8 in ("", "fp8 " * place.fp8)}
            looks |= {f"{look} of {kind}" for look in looks for kind in place.kinds}
            hints = tuple(fix.id for fix in self._open if looks & set(fix.looks_like)) if different else ()
            place = replace(place, text=text, looks_like=hints)
            say(str(place))
            self.mismatches += [place] if different else []

    def _new(self, *key: object) -> bool:
        new = key not in self._said
        self._said.add(key)
        return new

    @functools.cached_property
    def _open(self) -> list[Fix]:
        """The fixes that this TransformerEngine needs, and that are not applied."""
        found, applied = verdicts(Source.installed()), report().fixes
        needed = [fix for fix in CATALOGUE.values() if found[fix.id].verdict == APPLICABLE]
        return [fix for fix in needed if applied[fix.id].status != "applied"]

    def _report(self) -> None:
        """Hand the totals to rank 0, which reports. A collective could lock up: ranks end at different times."""
        store, number, size = self._job
        keys = [f"{self._name}/{each}" for each in range(size)]
        try:
            store.set(keys[number], json.dumps(self.totals))
            while number == 0 and not store.check(keys):
                if time.monotonic() > self._until:
                    raise TimeoutError("some have sent none")
                time.sleep(0.2)
            if number == 0:
                say(f"it does not see {UNSEEN} (docs/check.md)")
                say(_sentence([Counter(json.loads(store.get(key))) for key in keys]))
        except Exception as error:  # the process that holds the store has ended, for one
            say(f"rank {number}: {_sentence([self.totals])}; there is no report for all ranks: {error}")

    def _end(self) -> None:
        """At the end of the process, which may have had fewer steps than were to be checked."""
        self._until = time.monotonic() + (0 if hasattr(sys, "last_value") else PATIENCE)  # an exception ends the job
        try:
            self.finish()
        except Exception as error:
            say(f"the last comparisons could not be read: {type(error).__name__}: {error}")
        if self._reporter.is_alive():
            self._reporter.join(2 * PATIENCE)  # it ends by itself, unless the store hangs


def _sentence(totals: Sequence[Counter[str]]) -> str:
    total, where = sum(totals, Counter[str]()), f" on {len(totals)} ranks" if len(totals) > 1 else ""
    steps = max(each["steps"] for each in totals)
    text = f"{steps} steps, {total['callables']:,} callables, {total['tensors']:,} tensors compared{where}: "
    if total["different"]:
        text += f"{total['different']:,} differ"
        text += f", on rank {', '.join(str(i) for i, each in enumerate(totals) if each['different'])}" if where else ""
    else:
        text += "all equal" if total["tensors"] else "there was nothing to compare"
        if not total["tensors"] and not total["left out"]:
            text += ", as no graph of TransformerEngine's make_graphed_callables has been replayed"
    text += f", but for {total['noisy']:,} that eager itself does not reproduce" if total["noisy"] else ""
    return text + (f"; {total['left out']:,} callables are left out" if total["left out"] else "")
