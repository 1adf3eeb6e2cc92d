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
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import wrapt
from torch.distributed import distributed_c10d

from ..activation import report
from ..fix import APPLICABLE, Fix
from ..fixes import CATALOGUE
from ..source import Source
from ..verdicts import verdicts
from . import DIFFERENT

CHUNK = 1 << 22  # elements that are compared at a time; some 32 bytes of memory for each
NOISE = 8  # a mismatch is more than so many times what two eager runs differ by, which is named in any case
ANYTHING = 0.1  # of the norm: where these differ by more, as in memory that nothing has written, none can be told
PATIENCE = 60  # seconds that rank 0 waits for the other ranks at the end of its process
IN_USE = {"grad-overwritten": "is in use", "sent-overwritten": "is being sent"}
UNSEEN = "failed captures, modules without graphs, the order in which ranks run hooks, races between streams"
_numbers = itertools.count()  # the same on all ranks


def measure(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The norm of the difference over the norm of what is wanted; 0.0 is bit for bit, and NaN equals NaN."""
    tensors = [each.dequantize() if hasattr(each, "_quantizer") else each for each in (found, wanted)]
    total = torch.zeros(3, dtype=torch.float64, device=found.device)
    if found.shape != wanted.shape:
        return total[0] + math.inf
    for a, b in zip(*(each.detach().reshape(-1).split(CHUNK) for each in tensors), strict=True):
        unequal = (a != b) & ~(a.isnan() & b.isnan())
        a, b = a.double(), b.double()
        total += torch.stack((unequal.sum(), (a - b).square().sum(), b.square().sum()))
    unequal, difference, norm = total
    return torch.where(unequal > 0, (difference / norm).sqrt().nan_to_num(math.inf, math.inf), 0.0)


def say(text: str, of_rank: bool = True) -> None:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else int(os.environ.get("RANK", "0"))
    print(f"te-graph-fixes check: {f'rank {rank}, ' * of_rank}{text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Place:
    """A tensor that is compared, equal to those of its kind. A mismatch has a text, and fixes that could help."""

    module: str
    when: str
    tensor: str
    symptom: str
    callable: int = field(compare=False)
    step: int = field(compare=False)
    kinds: frozenset[str] = field(compare=False)
    text: str = field(default="", compare=False)
    looks_like: tuple[str, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        where = f"step {self.step}, callable {self.callable} ({self.module}), {self.when}"
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
        self._noise: defaultdict[Place, float] = defaultdict(float)
        self._said: set[object] = set()
        self._job: tuple[Any, int, int] = torch.distributed.HashStore(), 0, 1
        self._name = f"te_graph_fixes/check {next(_numbers)}"
        atexit.register(self.finish)

    def compare(self, place: Place, found: Any, eager: Any, again: Any) -> None:
        """Compare a tensor of the graph with that of eager, and that with what eager has computed ``again``."""
        if found is not None and eager is not None:
            self._pending.append((place, measure(found, eager), measure(again, eager)))
        elif found is not eager:
            place = replace(place, text="is missing" if found is None else "is not expected")
            self._pending.append((place, True, 0.0))

    def leave_out(self, index: int, module: str, reason: str) -> None:
        self.totals["left out"] += self.new(("left out", index))
        if self.new((module, reason)):
            say(f"callable {index} ({module}) is not compared, nor are others like it: {reason}")

    def step_over(self) -> None:
        """Read what has been compared so far. A strict check ends the process here."""
        if torch.distributed.is_initialized():
            store = distributed_c10d._get_default_store()
            self._job = store, torch.distributed.get_rank(), torch.distributed.get_world_size()
        pending, self._pending = [(place, float(error), float(noise)) for place, error, noise in self._pending], []
        for place, _, noise in pending:
            self._noise[place] = max(self._noise[place], noise)
            self.totals["steps"] = max(self.totals["steps"], place.step)
        for place, error, _ in pending:
            noise = self._noise[place]
            different = error > NOISE * noise and noise < ANYTHING
            new = self.new(place.callable)
            self.totals += Counter(tensors=1, callables=int(new), noisy=int(noise > 0), different=int(different))
            if (different or noise) and self.new((place, different)):
                text = place.text or f"is off by {error:.3g} of its norm"
                text += f", but is not reproducible: two eager runs differ by {noise:.3g}" if noise else ""
                looks = {place.symptom, *(f"{place.symptom} of {kind}" for kind in place.kinds)}
                looks |= {f"fp8 {look}" for look in looks if "fp8" in place.kinds}
                hints = tuple(fix.id for fix in self._open if looks & set(fix.looks_like)) if different else ()
                place = replace(place, text=text, looks_like=hints)
                say(str(place))
                self.mismatches += [place] if different else []
        if self._strict and self.totals["different"]:
            say(f"which ends with status {DIFFERENT}: {_sentence([self.totals])}")
            sys.stdout.flush()
            os._exit(DIFFERENT)

    def new(self, key: object) -> bool:
        """Whether this is asked for the first time."""
        new = key not in self._said
        self._said.add(key)
        return new

    @functools.cached_property
    def _open(self) -> list[Fix]:
        """The fixes that this TransformerEngine needs, and that are not applied."""
        found, applied = verdicts(Source.installed()), report().fixes
        needed = [fix for fix in CATALOGUE.values() if found[fix.id].verdict == APPLICABLE]
        return [fix for fix in needed if applied[fix.id].status != "applied"]

    def finish(self) -> None:
        """The check is over: rank 0 reports for the job, once all ranks are here."""
        if not self.finished:
            self.finished = True
            self.step_over()
            waits = self._job[2] > 1 and threading.main_thread().is_alive()
            (threading.Thread(target=self._report).start if waits else self._report)()

    def _report(self) -> None:
        """Hand the totals to rank 0, which reports. A collective could lock up: ranks end at different times."""
        store, number, size = self._job
        keys = [f"{self._name}/{each}" for each in range(size)]
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


class Lifetimes:
    """Tensors in graph memory that are in use, and whether a replay writes into them meanwhile.

    In use is what somebody surely reads: the ``.grad`` of a parameter that has taken over the memory of a graph, and
    what is being sent, until the program waits for it. Sends are seen in the process group, as torch compares `isend`
    by identity.
    """

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self.returned: dict[int, tuple[Place, torch.Tensor | None]] = {}
        """By address, what graphs have returned in their memory; the ``.grad`` of a parameter may lie there now."""
        self._sent: list[tuple[Place, torch.Tensor]] = []  # by sends that have no handle: the batch goes on
        self._sends: WeakKeyDictionary[Any, tuple[Any, list[tuple[Place, torch.Tensor]]]] = WeakKeyDictionary()
        self._before: list[tuple[str, Place, torch.Tensor, torch.Tensor]] = []
        self.undo = ExitStack()
        for name in ("Work.wait", "ProcessGroup.send", "ProcessGroup._end_coalescing"):
            self.undo.callback(setattr, *wrapt.resolve_path(distributed_c10d, name))
            wrapt.wrap_function_wrapper(distributed_c10d, name, self._wait if name == "Work.wait" else self._send)

    def before_replay(self) -> None:
        """What the program itself writes before this is no defect."""
        used = [("sent-overwritten", *each) for _, sent in self._sends.values() for each in sent]
        for address, (place, parameter) in self.returned.items():
            if (grad := getattr(parameter, "grad", None)) is not None and grad.data_ptr() == address:
                used.append(("grad-overwritten", place, grad))
        self._before = [(*each, each[2].sum(dtype=torch.float64)) for each in used]

    def after_replay(self, by: str) -> None:
        for symptom, place, tensor, total in self._before:
            place = replace(place, symptom=symptom, text=f"{IN_USE[symptom]} and overwritten by {by}")
            self._findings.compare(place, tensor.sum(dtype=torch.float64), total, total)
        self._before = []

    def _send(self, send: Any, group: Any, args: Any, kwargs: Any) -> Any:
        """Send tensors; or end a batch, all of which has one handle."""
        work = send(*args, **kwargs)
        for tensor in args[0] if isinstance(args[0], list) else ():
            if found := self.returned.get(tensor.data_ptr()):
                self._sent.append((found[0], tensor.detach()))
        if work is not None:
            self._sends[work], self._sent = ((group, args[1:2]), self._sent), []
        return work

    def _wait(self, wait: Any, work: Any, args: Any, kwargs: Any) -> Any:
        """Wait for a send, and with it for the earlier ones to the same rank: they go in order."""
        result = wait(*args, **kwargs)
        to, _ = self._sends.get(work, (None, ()))
        for each in list(self._sends) if to else ():
            if self._sends[each][0] == to:
                del self._sends[each]
            if each is work:
                break
        return result


def _sentence(totals: list[Counter[str]]) -> str:
    total, where = sum(totals, Counter[str]()), f" on {len(totals)} ranks" * (len(totals) > 1)
    ranks = ", ".join(str(i) for i, each in enumerate(totals) if each["different"])
    text = f"{max(each['steps'] for each in totals)} steps, {total['callables']:,} callables, "
    text += f"{total['tensors']:,} tensors compared{where}: "
    if ranks:
        text += f"{total['different']:,} differ" + f", on rank {ranks}" * bool(where)
    elif total["tensors"]:
        text += "all equal"
    else:
        text += "there was nothing to compare"
        if not total["left out"]:
            text += ", as no graph of TransformerEngine's make_graphed_callables has been replayed"
    text += f", but for {total['noisy']:,} that eager itself does not reproduce" * bool(total["noisy"])
    return text + f"; {total['left out']:,} callables are left out" * bool(total["left out"])
