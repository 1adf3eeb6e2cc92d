"""``python -m tests.explore --seed S --programs N``: compare the results of N random programs with and without graphs.

Without a GPU, the programs run on the simulator. See docs/maintainers/explorer.md.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import gc
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import te_graph_fixes
from tests import simulator
from tests.verify.driver.program import Program

from .programs import FOUND, draw, draw_broken, shrink
from .scripts import as_python, script

REFUSED = {
    r"captured for|has no backward": "arguments of a graph that differ from its sample arguments",
    r"returns a quantized tensor": "an FP8 output of a graph",
    r"captured with is_first_microbatch=True": "a later microbatch of a graph captured for the first one",
    r"its modules ran in another recipe": "an evaluation in another recipe between a forward and its backward",
}
"""The causes of documented errors, by patterns of their messages. A program that raises such an error is no finding."""

FINDINGS = ("wrong", "crash")
VERDICTS = ("equal", "refused", "not eager", "unstable", *FINDINGS)


def judge(program: Program) -> dict[str, Any]:
    """Run a program. Return a dict with its ``verdict`` and the reason ``why``. Of two ranks, return the worse dict."""
    from tests.verify.driver import setting

    setting.use(program)
    if not program.ranks:
        return judge_rank()
    from .kinds import connect

    connect()
    signal.alarm(Server.limit)  # a fork does not inherit the alarm
    found: list[Any] = [{}, {}]
    setting.dist.all_gather_object(found, judge_rank())
    if setting.dist.get_rank():
        os._exit(0)
    worst: dict[str, Any] = max(found, key=lambda each: VERDICTS.index(each["verdict"]))
    return worst


def judge_rank() -> dict[str, Any]:
    """Run the selected program in this process, twice eagerly and once with graphs. Return a dict as `judge` does."""
    from tests.verify.driver.comparison import differences
    from tests.verify.driver.events import train
    from tests.verify.programs import REFUSED as CONTRACT

    from .digests import said

    try:
        eager, again = train(False), train(False)
    except Exception as error:
        return {"verdict": "not eager", "why": said(error)}
    if differing := differences(again, eager):
        return {"verdict": "unstable", "why": str(differing)}
    try:
        wrong = differences(train(True), eager)
    except Exception as error:
        why = said(error)
        documented = [*REFUSED, CONTRACT] if Server.broken else REFUSED
        return {"verdict": "refused" if any(re.search(each, why) for each in documented) else "crash", "why": why}
    return {"verdict": "wrong" if wrong else "equal", "why": str(wrong)}


class Server:
    """A process that runs programs with one setting of the fixes.

    On the simulator, each program runs in a fork of the process. A fork cannot use a GPU that its parent process has
    used. On a GPU, the process therefore runs one program after the other, and a finding counts only if a new process
    repeats it.
    """

    files: ClassVar[list[Any]] = []
    forks = True
    broken = False
    """Whether programs may break replay preconditions, so that errors of `replay-contract` are no findings."""
    limit = 120
    """The time limit of a program in seconds."""

    def __init__(self, switch: str = "on", disable: str = "") -> None:
        self._setting = switch, disable
        self._start()

    def _start(self) -> None:
        (theirs, requests), (answers, ours) = os.pipe(), os.pipe()
        self.process = os.fork()
        if not self.process:
            for file in (os.fdopen(requests, "w"), os.fdopen(answers), *Server.files):
                file.close()  # otherwise the reader would not see the end of the pipe
            try:
                self._serve(theirs, ours)
            finally:
                os._exit(0)
        os.close(theirs)
        os.close(ours)
        self._requests, self._answers = os.fdopen(requests, "w"), os.fdopen(answers)
        Server.files += [self._requests, self._answers]
        if problem := json.loads(self._answers.readline()):
            self.close()
            raise ValueError(problem)

    def _serve(self, requests: int, answers: int) -> None:
        def answer(value: Any) -> None:
            os.write(answers, (json.dumps(value) + "\n").encode())

        signal.alarm(Server.limit)
        try:
            activate(*self._setting)
            gc.collect()
            gc.freeze()  # garbage collections in the programs skip existing objects
            answer(None)
        except Exception as error:
            from .digests import said

            answer(said(error))
            return
        import torch

        from .regressions import measure

        signal.alarm(0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        for line in os.fdopen(requests):
            child = os.fork() if Server.forks else 0
            if not child:
                signal.alarm(Server.limit)
                graphs, fields = json.loads(line)
                program = Program(**fields)
                verdict = judge(program) if graphs is None else measure(program, graphs)
                if not Server.forks:
                    torch.cuda.synchronize()  # raises after an illegal memory access, so the process ends
                answer(verdict)
                if Server.forks:
                    return
                signal.alarm(0)
                gc.collect()
                torch.cuda.empty_cache()
            elif status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
                answer({"verdict": "crash", "why": f"the process ended with {status}"})

    def __call__(self, program: Program) -> dict[str, Any]:
        """Run a program, and return the dict of `judge`. On a GPU, repeat a wrong or crashed one in a new process."""
        found = self._ask(program)
        if found["verdict"] in FINDINGS and not Server.forks:
            alone = self._ask(program)
            found = alone if alone["verdict"] in FINDINGS else {**alone, "after others": found}
        return found

    def measure(self, program: Program, graphs: bool = True) -> dict[str, Any]:
        """Return the result of `regressions.measure` for a program."""
        return self._ask(program, graphs)

    def _ask(self, program: Program, graphs: bool | None = None) -> dict[str, Any]:
        if not self.process:
            self._start()
        start = time.monotonic()
        print(json.dumps([graphs, dataclasses.asdict(program)]), file=self._requests, flush=True)
        crash = '{"verdict": "crash", "why": "the process ended"}'
        found: dict[str, Any] = json.loads(self._answers.readline() or crash)
        if found["verdict"] in (*FINDINGS, "raises") and not Server.forks:
            self.close()
        return {**found, "seconds": round(time.monotonic() - start, 2)}

    def close(self) -> None:
        """End the process. The next program starts another process."""
        if self.process:
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
            self.process = 0
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self._answers.close()


def activate(switch: str, disable: str) -> None:
    """Apply the selected fixes in this process, and import TE. Raise ValueError if a fix cannot be applied."""
    if switch != "off":
        os.environ["TE_GRAPH_FIXES"] = switch
        os.environ["TE_GRAPH_FIXES_DISABLE"] = disable
        te_graph_fixes.activate()
    from tests.verify.driver import comparison  # noqa: F401

    from . import kinds  # noqa: F401

    for fix_id, fix in te_graph_fixes.report().fixes.items():
        if fix.status in ("failed", "unrecognized"):
            raise ValueError(f"{fix_id}: {fix.status}: {fix.reason}")


def has_gpu() -> bool:
    """Return whether there is a GPU. A fork looks for it, because this process must not use a GPU before it forks."""
    import torch

    child = os.fork()
    if not child:
        os._exit(int(not torch.cuda.is_available()))
    return os.waitpid(child, 0)[1] == 0


def in_jobs(options: argparse.Namespace, count: int, work: Callable[[Iterator[int]], None]) -> None:
    """Call ``work`` in ``--jobs`` processes, with iterators that together yield each number below ``count`` once.

    End this process with an error if one of these processes fails, because programs are then missing in the results.
    """
    fork = multiprocessing.get_context("fork")
    begun = fork.Value("i", 0)

    def numbers() -> Iterator[int]:
        while True:
            with begun.get_lock():
                begun.value += 1
                number = begun.value - 1
            if number >= count:
                return
            yield number

    def job(place: int) -> None:
        if options.gpus > 1:
            os.environ["CUDA_VISIBLE_DEVICES"] = str(place % options.gpus)
        work(numbers())

    jobs = [fork.Process(target=job, args=(place,)) for place in range(min(options.jobs, count))]
    for each in jobs:
        each.start()
    for each in jobs:
        each.join()
    if failed := [each.exitcode for each in jobs if each.exitcode]:
        sys.exit(f"{len(failed)} of {len(jobs)} processes failed with status {failed[0]}. The results are incomplete.")


def note(options: argparse.Namespace, line: dict[str, Any], say: bool = True) -> None:
    """Append a line to the file of results immediately, and print the line if ``say`` is true."""
    text = json.dumps(line)
    with open(options.results, "a") as results:
        results.write(text + "\n")
    if say:
        print(text, flush=True)


def noted(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def find(options: argparse.Namespace) -> int:
    """Run programs with the selected fixes and, with ``--scripts``, write a script for each finding.

    Return the exit status, which is 1 if the file of results contains findings, else 0.
    """
    examples = [*FOUND.values()] if options.found else []

    def work(numbers: Iterable[int]) -> None:
        server = Server(options.switch, options.disable)
        for seed in (options.seed + number for number in numbers):
            if options.broken:
                program = draw_broken(seed)
            else:
                program = examples[seed - options.seed] if examples else draw(seed, options.gpu, options.ranks)
            small = program
            verdict = server(program)
            found = verdict["verdict"] in FINDINGS
            if found and options.shrink and not options.broken:
                small = shrink(program, lambda p, kind=verdict["verdict"]: server(p)["verdict"] == kind)
                verdict = server(small)
            note(options, {"seed": seed, **verdict, "program": as_python(small)}, say=found)
            if found and options.scripts:
                Path(options.scripts).mkdir(parents=True, exist_ok=True)
                title = f"Seed {seed}: {verdict['verdict']}: {verdict.get('why', '')}"
                Path(options.scripts, f"seed_{seed}.py").write_text(script(small, title))
        server.close()

    in_jobs(options, len(examples) or options.programs, work)
    lines = noted(options.results)[1:]
    counts = collections.Counter(line["verdict"] for line in lines)
    findings = {line["program"] for line in lines if line["verdict"] in FINDINGS}
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = round((used.ru_utime + used.ru_stime) / max(1, counts.total()), 2)
    after = sum("after others" in line for line in lines)
    total = {"programs": counts.total(), **counts, "different findings": len(findings), "CPU seconds": seconds}
    total |= {"only after others": after} if after else {}
    print(json.dumps(total))
    return 1 if findings else 0


def more_than_costs(line: dict[str, Any]) -> set[str]:
    """Return the kinds of regressions in a line of results, except higher costs. The set is empty if there are none."""
    return {each.split(":")[0] for each in line["worse"]} - {"cost"}


def compare(options: argparse.Namespace) -> int:
    """Run programs with TE alone and with the fixes, and list regressions and higher costs.

    Return the exit status. It is 1 if the fixes change eager training, or if a program is correct with TE alone but not
    with the fixes. Otherwise it is 0.
    """
    from .regressions import regressions

    def work(numbers: Iterable[int]) -> None:
        alone, fixed = Server("off"), Server(options.switch, options.disable)

        def compared(program: Program) -> dict[str, Any]:
            before = alone.measure(program)
            if before["verdict"] == "crash":  # the process ended, so the result of the eager run is lost
                before = {**alone.measure(program, graphs=False), "verdict": "crash"}
            now = fixed.measure(program)
            verdicts = {"verdict": before["verdict"], "with the fixes": now["verdict"], "why": now.get("why", "")}
            return {**verdicts, "worse": regressions(before, now), "program": as_python(program)}

        for seed in (options.seed + number for number in numbers):
            program = draw(seed, options.gpu, ranks=False)
            line = compared(program)
            if more_than_costs(line) and not Server.forks:  # a regression counts only if new processes repeat it
                alone.close()
                fixed.close()
                line = compared(program)
            if (kinds := more_than_costs(line)) and options.shrink:
                line = compared(shrink(program, lambda p, kinds=kinds: kinds <= more_than_costs(compared(p))))
            note(options, {"seed": seed, **line}, say=bool(kinds) or line["with the fixes"] == "wrong")
        alone.close()
        fixed.close()

    in_jobs(options, options.programs, work)
    lines = noted(options.results)[1:]
    total = {"programs": len(lines), **collections.Counter(line["verdict"] for line in lines)}
    raising = [line for line in lines if line["with the fixes"] in ("raises", "crash")]
    refusals = "|".join(REFUSED)
    undocumented = [line["seed"] for line in raising if not re.search(refusals, line["why"])]
    seeds = {
        "raises although TE alone is correct": [line["seed"] for line in raising if line["verdict"] == "equal"],
        "raises an error that is not documented": undocumented,
        "wrong without an error": [line["seed"] for line in lines if line["with the fixes"] == "wrong"],
    }
    total |= seeds | {
        "regressions": sum(map(bool, map(more_than_costs, lines))),
        "cost more": sum(any(each.startswith("cost:") for each in line["worse"]) for line in lines),
    }
    print(json.dumps(total))
    return 1 if total["regressions"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.explore", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first program")
    parser.add_argument("--programs", type=int, default=100, help="the number of programs, with consecutive seeds")
    parser.add_argument("--limit", type=int, default=120, help="the time limit of a program in seconds")
    parser.add_argument("--jobs", type=int, default=1, help="the number of processes that share the work")
    parser.add_argument("--gpus", type=int, default=1, help="the number of GPUs that the processes share")
    parser.add_argument("--switch", default="on", help="the value of TE_GRAPH_FIXES for the programs")
    parser.add_argument("--disable", default="", help="the value of TE_GRAPH_FIXES_DISABLE for the programs")
    parser.add_argument("--results", default="", help="append a line for each program to this file")
    parser.add_argument(
        "--regressions", action="store_true", help="compare results and costs with and without the fixes"
    )
    parser.add_argument("--scripts", default="", help="write a script for each finding to this folder")
    parser.add_argument("--no-shrink", dest="shrink", action="store_false", help="do not shrink programs of findings")
    parser.add_argument("--no-fork", action="store_true", help="run programs in one process, as on a GPU")
    parser.add_argument("--broken", action="store_true", help="draw programs that may break replay preconditions")
    parser.add_argument("--found", action="store_true", help="run the programs of `FOUND` instead of random programs")
    options = parser.parse_args()
    te_graph_fixes.deactivate()  # each server activates its own fixes
    os.environ.setdefault("TE_GRAPH_FIXES_VERBOSE", "0")
    from te_graph_fixes.patching.source import Source

    warnings.simplefilter("ignore")
    simulated = simulator.installed() or not has_gpu()
    options.gpu = os.environ.get("TE_SIMULATOR_GPU", "hopper")
    options.where = {"TE": Source.installed().version, "GPU": f"simulated {options.gpu}" if simulated else "real"}
    if simulated:
        simulator.install()
        import transformer_engine.pytorch  # noqa: F401
    Server.forks = options.ranks = simulated and not options.no_fork
    Server.limit, Server.broken = options.limit, options.broken
    with contextlib.ExitStack() as stack:
        if not options.results:
            options.results = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".jsonl")).name
        if not Path(options.results).exists() or not noted(options.results):
            note(options, options.where, say=False)
        if options.regressions:
            return compare(options)
        return find(options)


if __name__ == "__main__":
    sys.exit(main())
