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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from . import DIFFERENT, Options

CHUNK = 1 << 22
"""Elements that are compared at a time; some 32 bytes of memory for each."""
NOISE = 8
"""What eager does not reproduce is a mismatch only where graph and eager differ by more than so many times what two
eager runs differ by. It is named in any case, with both numbers."""
PATIENCE = 60
"""Seconds that rank 0 waits for the other ranks at the end of its process."""
UNSEEN = (
    "crashes in a capture and what they leave behind, modules without graphs, the order in which ranks run hooks, "
    "races between streams"
)
Judge = Callable[[Sequence[float]], None]


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


def _distributed() -> bool:
    return bool(torch.distributed.is_available() and torch.distributed.is_initialized())


def rank() -> int:
    """This process among those of the job."""
    return torch.distributed.get_rank() if _distributed() else int(os.environ.get("RANK", "0"))


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
    def key(self) -> tuple[str, str, str]:
        """The same for all callables of a kind."""
        return self.module, self.when, self.tensor

    def __str__(self) -> str:
        return f"rank {rank()}, step {self.step}, callable {self.callable} ({self.module}), {self.when}: {self.tensor}"


@dataclass(frozen=True)
class Mismatch:
    """The first tensor of its kind that a graph computes otherwise than eager.

    ``error`` is the norm of the difference over the norm of the eager value, inf where there is no number.
    ``looks_like`` are fixes of the catalogue that this TransformerEngine needs and that are not applied.
    """

    place: Place
    error: float
    text: str
    looks_like: tuple[str, ...]

    def __str__(self) -> str:
        hint = f"; looks like {' or '.join(self.looks_like)}" if self.looks_like else ""
        return f"{self.place} {self.text}{hint}"


@dataclass
class Totals:
    """What one rank has compared."""

    steps: int = 0
    callables: int = 0
    tensors: int = 0
    different: int = 0
    noisy: int = 0
    left_out: int = 0


class Findings:
    """The comparisons of this process."""

    _numbers = itertools.count()

    def __init__(self, options: Options) -> None:
        self.options, self._number = options, next(self._numbers)
        self.totals = Totals()
        self.mismatches: list[Mismatch] = []
        self.finished = False
        self._pending: list[tuple[torch.Tensor, Judge]] = []
        self._noises: list[tuple[torch.Tensor, Judge]] = []
        self._noise: dict[tuple[str, ...], float] = {}
        self._said: set[tuple[str, ...]] = set()
        self._callables: set[int] = set()
        self._left_out: dict[str, list[int]] = {}
        self._open: list[Any] | None = None
        self._job: threading.Thread | None = None
        atexit.register(self._end)

    def noise(self, place: Place, once: torch.Tensor, again: torch.Tensor) -> None:
        """The same tensor of two eager runs."""
        key = place.key

        def judge(numbers: Sequence[float]) -> None:
            self._noise[key] = max(self._noise.get(key, 0.0), _error(numbers))

        self._noises.append((measure(again, once), judge))

    def compare(
        self,
        place: Place,
        found: torch.Tensor | None,
        wanted: torch.Tensor | None,
        symptom: str,
        before: torch.Tensor | None = None,
    ) -> None:
        """Compare a tensor of the graph with that of eager, which was added to ``before``, if that is given."""
        if found is None or wanted is None:
            if (found is None) != (wanted is None):
                self.wrong(place, symptom, "is missing" if found is None else "is not expected")
            return
        self._count(place)
        parts = [measure(found, wanted)] + ([] if before is None else [measure(found, wanted, before)])

        def judge(numbers: Sequence[float]) -> None:
            error, noise = _error(numbers[:3]), self._noise.get(place.key, 0.0)
            text = f"is off by {error:.3g} of its norm"
            if noise:
                self.totals.noisy += 1
                text += f", where two eager runs differ by {noise:.3g}"
                self._say_once(place, "not reproducible", f"{place} is not reproducible: the graph's {text}")
            if error > NOISE * noise:
                replaced = before is not None and _error(numbers[3:]) < 0.1 * error
                self._different(place, error, "wgrad-replaced" if replaced else symptom, text)

        self._pending.append((torch.cat(parts), judge))

    def overwritten(self, place: Place, changed: torch.Tensor, symptom: str, text: str) -> None:
        """``changed``: whether somebody has written into a tensor that is in use."""
        self._count(place)

        def judge(numbers: Sequence[float]) -> None:
            if numbers[0]:
                self._different(place, math.inf, symptom, text)

        self._pending.append((changed.double().reshape(1), judge))

    def wrong(self, place: Place, symptom: str, text: str) -> None:
        """Something that a graph does otherwise, without a number for it."""
        self._count(place)
        self._different(place, math.inf, symptom, text)

    def leave_out(self, index: int, module: str, reason: str) -> None:
        """The callable ``index`` is not compared."""
        numbers = self._left_out.setdefault(f"({module}) is not compared: {reason}", [])
        if index not in numbers:
            numbers.append(index)
            self.totals.left_out += 1

    def step_over(self, steps: int) -> None:
        """Read what has been compared in the ``steps`` so far. A strict check ends the process here."""
        self.totals.steps = max(self.totals.steps, steps)
        read = self._noises + self._pending
        self._noises, self._pending = [], []
        numbers = iter(torch.cat([values for values, _ in read]).tolist() if read else ())
        for values, judge in read:
            judge(list(itertools.islice(numbers, values.numel())))
        if self.options.strict and self.totals.different:
            self._say_left_out()
            say(f"rank {rank()} ends with status {DIFFERENT}: {_sentence([self.totals])}")
            sys.stdout.flush()
            os._exit(DIFFERENT)

    def finish(self, steps: int) -> None:
        """The check is over: rank 0 reports for the job, once all ranks are here."""
        if self.finished:
            return
        self.finished = True
        self.step_over(steps)
        self._say_left_out()
        if not _distributed() or torch.distributed.get_world_size() == 1:
            _report([self.totals])
            return
        store = torch.distributed.distributed_c10d._get_default_store()
        keys = [f"te_graph_fixes/check {self._number}/{each}" for each in range(torch.distributed.get_world_size())]
        self._job = threading.Thread(target=_report_job, args=(self.totals, store, rank(), keys), daemon=True)
        self._job.start()

    def _count(self, place: Place) -> None:
        self.totals.tensors += 1
        self._callables.add(place.callable)
        self.totals.callables = len(self._callables)

    def _different(self, place: Place, error: float, symptom: str, text: str) -> None:
        self.totals.different += 1
        if self._say_once(place, symptom):
            self.mismatches.append(Mismatch(place, error, text, tuple(self._hints(place, symptom))))
            say(str(self.mismatches[-1]))

    def _say_once(self, place: Place, about: str, text: str = "") -> bool:
        key = *place.key, about
        new = key not in self._said
        self._said.add(key)
        if new and text:
            say(text)
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
            self._open = [
                fix
                for fix in CATALOGUE.values()
                if found[fix.id].verdict == APPLICABLE and applied[fix.id].status != "applied"
            ]
        for fix in self._open:
            for look in fix.looks_like:
                what, _, kind = look.partition(" of ")
                alike = what in ((symptom, f"fp8 {symptom}") if place.fp8 else (symptom,))
                if alike and (not kind or kind in place.kinds):
                    yield fix.id

    def _say_left_out(self) -> None:
        for text, numbers in self._left_out.items():
            say(f"rank {rank()}, callable {', '.join(map(str, numbers))} {text}")

    def _end(self) -> None:
        """At the end of the process, which may have had fewer steps than were to be checked."""
        try:
            self.finish(self.totals.steps)
        except Exception as error:
            say(f"rank {rank()}: the last comparisons could not be read: {type(error).__name__}: {error}")
        if self._job is not None:
            self._job.join(PATIENCE)


def _sentence(ranks: Sequence[Totals]) -> str:
    tensors, callables, different, noisy, left_out = (
        sum(getattr(each, name) for each in ranks)
        for name in ("tensors", "callables", "different", "noisy", "left_out")
    )
    where = f" on {len(ranks)} ranks" if len(ranks) > 1 else ""
    steps = max(each.steps for each in ranks)
    text = f"{steps} step{'s' * (steps != 1)}, {callables:,} callables, {tensors:,} tensors compared{where}: "
    if different:
        text += f"{different:,} differ"
        if where:
            text += f", on rank {', '.join(str(i) for i, each in enumerate(ranks) if each.different)}"
    else:
        text += "all equal" if tensors else "nothing to compare"
    text += f", but for {noisy:,} that eager itself does not reproduce" if noisy else ""
    return text + (f"; {left_out:,} callables are left out" if left_out else "")


def _report(ranks: Sequence[Totals]) -> None:
    say(f"it does not see {UNSEEN}: docs/check.md")
    say(_sentence(ranks))


def _report_job(own: Totals, store: Any, number: int, keys: list[str]) -> None:
    """Hand the totals of this rank to rank 0, which reports. A collective could lock up: ranks end at other times."""
    try:
        store.set(keys[number], json.dumps(asdict(own)))
        if number == 0:
            while not store.check(keys):
                time.sleep(0.2)
            _report([Totals(**json.loads(store.get(key))) for key in keys])
    except RuntimeError as error:  # the process that holds the store has ended
        say(f"rank {number}: {_sentence([own])}; there is no report for all ranks: {error}")
