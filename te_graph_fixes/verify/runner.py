"""Measure cases in child processes, once with the package off and once with it on, several children at a time."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from typing import Any

from ..settings import SWITCH, Settings
from ..version import __version__
from .cases import Case

CHILD = (sys.executable, "-m", f"{__package__}.child")
LIMIT = 60.0
"""Seconds that a case may take, the start of its process included."""

COULD_NOT_RUN = 3
"""The exit status where cases could not run, and no other was wrong."""

WITHOUT, WITH = "without", "with"


@dataclass(frozen=True)
class Outcome:
    """The answer of a child for a case.

    ``outcome`` is ``measured`` (then ``error`` is a number, 0.0 for bit for bit), ``failed`` (the case raised
    ``detail``, or its process died), ``skipped`` or ``unmeasured`` (because of ``detail``), or ``unable``
    (TransformerEngine does not have what the case imports, which ``detail`` names).
    """

    outcome: str
    error: float | None = None
    detail: str = ""
    te: str | None = None
    gpu: str | None = None
    applied: Sequence[str] = ()
    seconds: float = 0.0
    measures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        return self.outcome == "measured" and self.error == 0.0

    @property
    def wrong(self) -> bool:
        return self.outcome in ("measured", "failed") and not self.right

    @property
    def text(self) -> str:
        """The error, or what happened instead."""
        if self.outcome != "measured" or self.error is None:
            return {"failed": self.detail, "unable": "could not run"}.get(self.outcome, self.outcome)
        return f"{self.error:.3g}"


@dataclass(frozen=True)
class Row:
    """One case, measured without (None: that cannot be) and with the fixes."""

    case: Case
    without: Outcome | None
    with_fixes: Outcome

    @property
    def verdict(self) -> str:
        """``right``, ``fixed``, ``not affected``, ``STILL WRONG``, ``skipped``, ``could not run``, ``not measured``."""
        if self.skipped:
            return f"skipped: {self.with_fixes.detail}"
        if self.unable:
            return f"could not run: {self.with_fixes.detail}"
        if self.with_fixes.wrong:
            return "STILL WRONG"
        if self.without is None and self.with_fixes.right:
            return "right"
        for switch, outcome in ((WITH, self.with_fixes), (WITHOUT, self.without or self.with_fixes)):
            if outcome.outcome in ("unmeasured", "skipped", "unable"):
                return f"not measured {switch} the fixes: {outcome.detail}"
        return "not affected" if self.without and self.without.right else "fixed"

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, or unknown, with the package on."""
        return self.with_fixes.right or self.skipped

    @property
    def skipped(self) -> bool:
        """Whether this GPU or this TE lacks what the case needs, which the fixes cannot change."""
        return self._both("skipped")

    @property
    def unable(self) -> bool:
        """Whether this TE does not have what the case imports, with the fixes as without."""
        return self._both("unable")

    def _both(self, outcome: str) -> bool:
        return self.with_fixes.outcome == outcome and (self.without is None or self.without.outcome == outcome)

    def as_dict(self) -> dict[str, Any]:
        return {
            "case": self.case.name,
            "fixes": list(self.case.fixes),
            "verdict": self.verdict,
            WITHOUT: self.without and asdict(self.without),
            WITH: asdict(self.with_fixes),
        }


class Child:
    """A process that measures cases, started when it is needed and again after it has ended."""

    def __init__(self, environ: Mapping[str, str], command: Sequence[str] = CHILD) -> None:
        self._command, self._environ = command, environ
        self._process: subprocess.Popen[str] | None = None
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115

    def measure(self, case: Case, limit: float = LIMIT) -> Outcome:
        """The outcome of ``case``; a child that takes longer than ``limit`` seconds is killed."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # then it has ended, and there is nothing to be read
            print(case.to_json(), file=process.stdin, flush=True)
        ready, _, _ = select.select([process.stdout], [], [], limit)
        if not ready:
            self._end()
            return Outcome("unmeasured", detail=f"no result in {limit:g} s")
        line = process.stdout.readline()
        if not line:
            self._end()
            return Outcome("failed", detail=f"the process ended with status {process.returncode}: {self._last_words()}")
        result = json.loads(line)
        if result.pop("last"):
            self._end()
        del result["case"]
        return Outcome(**result)

    def close(self) -> None:
        """End the process, whatever it does."""
        self._end()
        self._stderr.close()

    def _end(self) -> None:
        if self._process is not None:
            with contextlib.suppress(BrokenPipeError), self._process as process:
                process.kill()
            self._process = None

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = [line.strip() for line in self._stderr if line.strip()]
        return lines[-1] if lines else "it said nothing"


def environment(switch: str) -> dict[str, str]:
    """This process's environment with the fixes off, or with the user's own choice of fixes, all if that is none."""
    if switch == WITHOUT:
        return {**os.environ, SWITCH: "off"}
    return {**os.environ, SWITCH: "on"} if Settings.read().off else dict(os.environ)


def measure(
    cases: Sequence[Case],
    limit: float = LIMIT,
    switches: Sequence[str] = (WITHOUT, WITH),
    workers: int | None = None,
    command: Sequence[str] = CHILD,
) -> list[Row]:
    """Measure ``cases`` without and with the fixes in ``workers`` processes (default: up to 8, by the CPUs).

    A TransformerEngine that is corrected on disk cannot be measured `WITHOUT`: it is left out of ``switches``.
    ``command`` starts a child. Progress goes to stderr.
    """
    number = min(max(1, (workers or min(8, os.cpu_count() or 1)) // 2), len(cases))
    children = [(switch, Child(environment(switch), command)) for switch in switches for _ in range(number)]
    waiting = {switch: iter(cases) for switch in switches}
    results: dict[tuple[str, str], Outcome] = {}
    numbers, total = itertools.count(1), len(cases) * len(switches)

    def work(switch: str, child: Child) -> None:
        for case in waiting[switch]:
            outcome = results[switch, case.name] = child.measure(case, limit)
            _say(f"[{next(numbers)}/{total}] {case.name}, {switch} the fixes: {outcome.text}")

    _say(
        f"{total} measurements of {len(cases)} cases in {len(children)} processes, which import TransformerEngine first"
    )
    with ThreadPoolExecutor(len(children)) as pool:
        try:
            for done in as_completed([pool.submit(work, *child) for child in children]):
                done.result()
        finally:  # where one fails, nothing more is started
            for left in waiting.values():
                list(left)
            for _, child in children:
                child.close()
    return [Row(case, results.get((WITHOUT, case.name)), results[WITH, case.name]) for case in cases]


def table(rows: Iterable[Row]) -> str:
    """The rows as text, one line each."""
    lines: list[tuple[str, ...]] = [("FIX", "CASE", "ERROR WITHOUT", "ERROR WITH", "VERDICT")]
    for row in rows:
        cells = [_cell(outcome) for outcome in (row.without, row.with_fixes)]
        lines.append((", ".join(row.case.fixes), row.case.name, *cells, row.verdict))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _cell(outcome: Outcome | None) -> str:
    text = outcome.text if outcome else "-"
    return text if len(text) <= 40 else f"{text[:37]}..."


def no_gpu() -> str | None:
    """Why there is no GPU here, or None. Asks the driver, without importing torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver (libcuda.so.1)"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or not count.value:
        return (
            f"the NVIDIA driver shows no GPU (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"
        )
    return None


def verify(cases: Sequence[Case], as_json: bool = False, limit: float = LIMIT, on_disk: bool = False) -> int:
    """Measure ``cases`` and print the table, or JSON; progress goes to stderr. ``on_disk``: TE is corrected there.

    The exit status is 0 only if, with the package on, every case that this GPU can run is bit-identical to eager. It is
    1 if one is not, and `COULD_NOT_RUN` if the others are, but there are cases that this TE cannot run.
    """
    start = time.perf_counter()
    if on_disk:
        _say(
            "te-graph-fixes: TransformerEngine is corrected on disk, so nothing can be measured without the fixes; "
            "its graphs are compared with eager alone"
        )
    rows = measure(cases, limit, (WITH,) if on_disk else (WITHOUT, WITH))
    seconds = time.perf_counter() - start
    bad = [row for row in rows if not row.ok]
    gpu = next((row.with_fixes.gpu for row in rows if row.with_fixes.gpu), None)
    te = next((row.with_fixes.te for row in rows if row.with_fixes.te), None)
    left_out: dict[str, list[str]] = {}
    for row in rows:
        if row.skipped:
            left_out.setdefault(row.with_fixes.detail, []).append(row.case.name)
    if as_json:
        about = {
            "te_graph_fixes_version": __version__,
            "te_version": te,
            "gpu": gpu,
            "seconds": round(seconds, 1),
            "ok": not bad,
            "left_out": left_out,
            "cases": [row.as_dict() for row in rows],
        }
        without_inf = json.loads(json.dumps(about), parse_constant=lambda word: str(float(word)))  # JSON has none
        print(json.dumps(without_inf, indent=2))
    else:
        print(table(row for row in rows if not row.skipped))
        for why, names in left_out.items():
            print(f"left out ({why}): {', '.join(names)}")
        counts = Counter(row.verdict.partition(":")[0] for row in rows)
        summary = ", ".join(f"{number} {word}" for word, number in counts.items())
        print(f"{len(rows)} cases on {gpu or 'no GPU'}, TransformerEngine {te or '?'}, {seconds:.0f} s: {summary}")
    for row in bad:
        why = row.with_fixes.text if row.with_fixes.wrong else row.verdict
        _say(f"te-graph-fixes: {row.case.name}: {why}")
    return COULD_NOT_RUN if bad and all(row.unable for row in bad) else int(bool(bad))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
