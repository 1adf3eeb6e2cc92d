"""Run cases in child processes, without and with the fixes, several at a time."""

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

from te_graph_fixes.settings import SWITCH, Settings
from te_graph_fixes.text import print_stderr
from te_graph_fixes.version import __version__

from .cases import Case

CHILD = (sys.executable, "-m", f"{__package__}.child")
LIMIT = 60.0
"""The time limit for a case in seconds, including the start of its process."""

COULD_NOT_RUN = 3
"""The exit status if this TransformerEngine could not run some cases and all other cases are correct."""

WITHOUT, WITH = "without", "with"


@dataclass(frozen=True)
class Outcome:
    """The result of one case in one child process.

    ``outcome`` is ``measured``, ``failed`` (the case raised an error, or its process died), ``skipped`` (this GPU or
    this TransformerEngine does not support the case), ``unmeasured`` (for example, because time or memory ran out) or
    ``unable`` (this TransformerEngine lacks a name that the case imports). If the case was ``measured``, ``error`` is
    the largest relative error, which is 0.0 for bit-identical results. Otherwise, ``detail`` is the reason.
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
    def correct(self) -> bool:
        return self.outcome == "measured" and self.error == 0.0

    @property
    def wrong(self) -> bool:
        return self.outcome in ("measured", "failed") and not self.correct

    @property
    def text(self) -> str:
        """Return the relative error or, if the case was not measured, its error message or its outcome in words."""
        if self.outcome != "measured" or self.error is None:
            return {"failed": self.detail, "unable": "could not run"}.get(self.outcome, self.outcome)
        return f"{self.error:.3g}"


@dataclass(frozen=True)
class Row:
    """One case with its outcomes. The outcome ``without`` the fixes is None if the case was not run without them."""

    case: Case
    without: Outcome | None
    with_fixes: Outcome

    @property
    def verdict(self) -> str:
        """Return the verdict: correct, fixed, not affected, STILL WRONG, skipped, could not run, or not measured."""
        if self.skipped:
            return f"skipped: {self.with_fixes.detail}"
        if self.unable:
            return f"could not run: {self.with_fixes.detail}"
        if self.with_fixes.wrong:
            return "STILL WRONG"
        if self.without is None and self.with_fixes.correct:
            return "correct"
        for switch, outcome in ((WITH, self.with_fixes), (WITHOUT, self.without or self.with_fixes)):
            if outcome.outcome in ("unmeasured", "skipped", "unable"):
                return f"not measured {switch} the fixes: {outcome.detail}"
        return "not affected" if self.without and self.without.correct else "fixed"

    @property
    def ok(self) -> bool:
        """Return whether the case is skipped, or correct with the fixes."""
        return self.with_fixes.correct or self.skipped

    @property
    def skipped(self) -> bool:
        """Return whether this GPU or this TE cannot run the case at all."""
        return self._both("skipped")

    @property
    def unable(self) -> bool:
        """Return whether this TE lacks a name that the case imports, with and without the fixes."""
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
    """A child process that runs cases. It starts for the first case, and restarts for the next case if it has ended."""

    def __init__(self, environ: Mapping[str, str], command: Sequence[str] = CHILD) -> None:
        self._command, self._environ = command, environ
        self._process: subprocess.Popen[str] | None = None
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115

    def measure(self, case: Case, limit: float = LIMIT) -> Outcome:
        """Return the outcome of ``case`` in the process. Kill the process if it takes more than ``limit`` seconds."""
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
        with contextlib.suppress(BrokenPipeError):  # the process has ended, so reading returns nothing
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
        """Kill the process."""
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
        return lines[-1] if lines else "no output on stderr"


def environment(switch: str) -> dict[str, str]:
    """Return the environment of a child process that runs without or, if ``switch`` is `WITH`, with the fixes.

    With the fixes, the user's settings apply, but ``on`` replaces a setting that turns all fixes off.
    """
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
    """Run ``cases`` without and with the fixes, and return a row for each.

    For each of the ``switches``, ``command`` starts ``workers`` // 2 processes, but at least one and at most one per
    case. By default, ``workers`` is the number of CPUs, but at most 8. A baked TransformerEngine cannot run without the
    fixes, so its ``switches`` are only `WITH`. Progress is printed to stderr.
    """
    number = min(max(1, (workers or min(8, os.cpu_count() or 1)) // 2), len(cases))
    children = [(switch, Child(environment(switch), command)) for switch in switches for _ in range(number)]
    waiting = {switch: iter(cases) for switch in switches}
    results: dict[tuple[str, str], Outcome] = {}
    numbers, total = itertools.count(1), len(cases) * len(switches)

    def work(switch: str, child: Child) -> None:
        for case in waiting[switch]:
            outcome = results[switch, case.name] = child.measure(case, limit)
            print_stderr(f"[{next(numbers)}/{total}] {case.name}, {switch} the fixes: {outcome.text}")

    print_stderr(
        f"{total} runs of {len(cases)} cases in {len(children)} processes. Importing TransformerEngine takes a while."
    )
    with ThreadPoolExecutor(len(children)) as pool:
        try:
            for done in as_completed([pool.submit(work, *child) for child in children]):
                done.result()
        finally:  # after an error, no other case starts
            for left in waiting.values():
                list(left)
            for _, child in children:
                child.close()
    return [Row(case, results.get((WITHOUT, case.name)), results[WITH, case.name]) for case in cases]


def table(rows: Iterable[Row]) -> str:
    """Return the rows as text, with a heading and a line for each row."""
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
    """Return the reason why no GPU can be used, or None. Ask the driver, without importing torch."""
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


def verify(cases: Sequence[Case], as_json: bool = False, limit: float = LIMIT, baked: bool = False) -> int:
    """Run ``cases``, and print the table or JSON. If ``baked`` is true, run them only with the fixes in TE's files.

    Return the exit status. It is 0 if, with the fixes, all cases are bit-identical to eager training or skipped. It is
    `COULD_NOT_RUN` if this TE lacks a name that some cases import, and all other cases pass. Otherwise it is 1.
    """
    start = time.perf_counter()
    if baked:
        print_stderr(
            "te-graph-fixes: The fixes are baked into this TransformerEngine, so no case can run without them. "
            "Each case compares graphs with eager training."
        )
    rows = measure(cases, limit, (WITH,) if baked else (WITHOUT, WITH))
    seconds = time.perf_counter() - start
    bad = [row for row in rows if not row.ok]
    gpu = next((row.with_fixes.gpu for row in rows if row.with_fixes.gpu), None)
    te = next((row.with_fixes.te for row in rows if row.with_fixes.te), None)
    skipped: dict[str, list[str]] = {}
    for row in rows:
        if row.skipped:
            skipped.setdefault(row.with_fixes.detail, []).append(row.case.name)
    if as_json:
        about = {
            "te_graph_fixes_version": __version__,
            "te_version": te,
            "gpu": gpu,
            "seconds": round(seconds, 1),
            "ok": not bad,
            "skipped": skipped,
            "cases": [row.as_dict() for row in rows],
        }
        without_inf = json.loads(json.dumps(about), parse_constant=lambda word: str(float(word)))  # JSON has no inf
        print(json.dumps(without_inf, indent=2))
    else:
        print(table(row for row in rows if not row.skipped))
        for why, names in skipped.items():
            print(f"skipped ({why}): {', '.join(names)}")
        counts = Counter(row.verdict.partition(":")[0] for row in rows)
        summary = ", ".join(f"{number} {word}" for word, number in counts.items())
        print(f"{len(rows)} cases on {gpu or 'no GPU'}, TransformerEngine {te or '?'}, {seconds:.0f} s: {summary}")
    for row in bad:
        why = row.with_fixes.text if row.with_fixes.wrong else row.verdict
        print_stderr(f"te-graph-fixes: {row.case.name}: {why}")
    return COULD_NOT_RUN if bad and all(row.unable for row in bad) else int(bool(bad))
