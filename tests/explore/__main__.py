"""``python -m tests.explore --seed S --programs N``: draw programs, run them eagerly and through graphs, and compare.

On a machine without a GPU they run on the simulator. See docs/explorer.md.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import json
import os
import random
import re
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from .programs import Program, draw, shrink
from .scripts import script

LIMIT = 120
"""Seconds that one program may take."""

REFUSED = {
    r"captured for": "a graph's arguments are not those of its samples",
}
"""Messages of documented refusals: no finding."""


def judge(program: Program, wanted: str | None = None) -> dict[str, Any]:
    """Run a program in this process: its verdict. ``wanted`` is the digest of what a graph gave elsewhere."""
    from . import training

    training.program = program
    eager: Any = {}
    if wanted is None:
        try:
            eager, again = training.train(False), training.train(False)
        except Exception as error:
            return {"verdict": "not eager", "why": said(error)}
        if differing := training.differences(again, eager):
            return {"verdict": "unstable", "why": str(differing)}
    try:
        found = training.train(True)
    except Exception as error:
        why = said(error)
        return {"verdict": "refused" if any(re.search(each, why) for each in REFUSED) else "crash", "why": why}
    given = digest(found)
    if wanted is not None:
        return {"verdict": "equal" if given == wanted else "wrong", "digest": given}
    wrong = training.differences(found, eager)
    return {"verdict": "wrong" if wrong else "equal", "why": str(wrong), "digest": given}


def said(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({Path(last.filename).name}:{last.lineno})"


def digest(found: dict[str, list[Any]]) -> str:
    import hashlib

    import torch

    total = hashlib.sha256()
    for name, values in found.items():
        total.update(name.encode())
        for value in values:
            if value is None:
                total.update(b"None")
                continue
            total.update(str((value.dtype, value.shape)).encode())
            total.update(value.contiguous().view(torch.uint8).cpu().numpy().tobytes() if value.numel() else b"")
    return total.hexdigest()[:16]


class Server:
    """A process with one setting of the fixes, which runs each program in a fork of its own.

    Without ``forks``, as on a GPU, which a fork of a process that uses it cannot use, it runs one program after the
    other, and begins anew after a crash.
    """

    files: ClassVar[list[Any]] = []
    forks = True

    def __init__(self, switch: str = "", disable: str = "", breakage: tuple[str, int] | None = None) -> None:
        self._setting = switch, disable, breakage
        (self._theirs, requests), (answers, theirs) = os.pipe(), os.pipe()
        self.process = os.fork()
        if not self.process:
            os.close(requests)
            os.close(answers)
            for file in Server.files:
                file.close()  # else that server would not see its end
            self._serve(theirs, switch, disable, breakage)
        os.close(self._theirs)
        os.close(theirs)
        self._requests, self._answers = os.fdopen(requests, "w"), os.fdopen(answers)
        Server.files += [self._requests, self._answers]
        if problem := json.loads(self._answers.readline()):
            raise ValueError(problem)

    def _serve(self, answers: int, switch: str, disable: str, breakage: tuple[str, int] | None) -> None:
        import te_graph_fixes

        def answer(value: Any) -> None:
            os.write(answers, (json.dumps(value) + "\n").encode())

        try:
            if switch != "off":
                if breakage:
                    leave_out(*breakage)
                os.environ["TE_GRAPH_FIXES"] = switch or "on"
                os.environ["TE_GRAPH_FIXES_DISABLE"] = disable
                te_graph_fixes.activate()
            from . import training  # noqa: F401

            gc.collect()
            gc.freeze()  # what is there is not looked through by every program
            answer(None)
        except Exception as error:
            answer(said(error))
            os._exit(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        for line in os.fdopen(self._theirs):
            child = os.fork() if Server.forks else 0
            if not child:
                signal.alarm(LIMIT)
                fields, wanted = json.loads(line)
                answer(judge(Program(**fields), wanted))
                if Server.forks:
                    os._exit(0)
            elif status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
                answer({"verdict": "crash", "why": f"the process ended with {status}"})
        os._exit(0)

    def __call__(self, program: Program, wanted: str | None = None) -> dict[str, Any]:
        print(json.dumps([dataclasses.asdict(program), wanted]), file=self._requests, flush=True)
        crash = '{"verdict": "crash", "why": "the process ended"}'
        found: dict[str, Any] = json.loads(self._answers.readline() or crash)
        if found["verdict"] == "crash" and not Server.forks:
            self.close()
            self.__init__(*self._setting)  # type: ignore[misc]
        return found

    def close(self) -> None:
        self._requests.close()
        self._answers.close()
        os.waitpid(self.process, 0)


def leave_out(fix_id: str, number: int) -> None:
    """Leave one edit of a fix out."""
    from te_graph_fixes.fixes import CATALOGUE

    fix = CATALOGUE[fix_id]

    def examine(source: Any) -> Any:
        verdict = fix.examine(source)
        return dataclasses.replace(verdict, edits=verdict.edits[:number] + verdict.edits[number + 1 :])

    CATALOGUE[fix_id] = dataclasses.replace(fix, examine=examine)


def equal_programs(on: Server, options: argparse.Namespace) -> Iterator[tuple[int, Program, str]]:
    """The programs that are right with all fixes, numbered from 1, with the digests of their graphs."""
    start = time.monotonic()
    for count in range(options.programs):
        program = draw(options.seed + count, options.gpu)
        verdict = on(program)
        if time.monotonic() - start > options.seconds:
            return
        if verdict["verdict"] == "equal":
            yield count + 1, program, verdict["digest"]


def find(options: argparse.Namespace) -> int:
    """Run programs with the fixes that the environment asks for; write a script for each finding."""
    server = Server(options.switch, options.disable)
    counts: collections.Counter[str] = collections.Counter()
    findings: dict[str, int] = {}
    start = time.monotonic()
    for seed in range(options.seed, options.seed + options.programs):
        if time.monotonic() - start > options.seconds:
            break
        program = draw(seed, options.gpu)
        verdict = server(program)
        counts[verdict["verdict"]] += 1
        if verdict["verdict"] in FINDINGS:
            small = program
            if options.shrink:
                small = shrink(program, lambda p, kind=verdict["verdict"]: server(p)["verdict"] == kind)
            findings.setdefault(str(small), seed)
            report(options, seed, small, server(small))
        elif options.verbose:
            print(seed, verdict, program, flush=True)
    server.close()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = round((used.ru_utime + used.ru_stime) / max(1, counts.total()), 2)
    print(
        json.dumps({"programs": counts.total(), **counts, "different findings": len(findings), "CPU seconds": seconds})
    )
    return 1 if findings else 0


def report(options: argparse.Namespace, seed: int, program: Program, verdict: dict[str, Any]) -> None:
    """Say what was found, and write its script."""
    print(json.dumps({"seed": seed, **verdict, "program": str(program)}), flush=True)
    if options.scripts:
        Path(options.scripts).mkdir(parents=True, exist_ok=True)
        title = f"Seed {seed}: {verdict['verdict']}: {verdict.get('why', '')}"
        Path(options.scripts, f"seed_{seed}.py").write_text(script(program, title))


def defects(options: argparse.Namespace) -> int:
    """How many programs it takes to find each defect of the catalogue that this TE has.

    A program finds a defect if its fix alone is left out and the graph differs; it must be equal with all fixes, and it
    is tried only where it differs without any. Where other fixes require that fix, it must be equal without these.
    """
    from te_graph_fixes.fixes import CATALOGUE

    on, off, needed = Server(), Server("off"), applied()
    without: dict[frozenset[str], Server] = {}

    def differs(left_out: Sequence[str], program: Program, wanted: str) -> bool:
        key = frozenset(left_out)
        if key not in without:
            without[key] = Server(disable=",".join(sorted(key)))
        return without[key](program, wanted)["verdict"] in FINDINGS

    found: dict[str, int] = {}
    different = total = 0
    for count, program, wanted in equal_programs(on, options):
        total = count
        left = [each for each in needed if each not in found]
        if off(program, wanted)["verdict"] not in FINDINGS:
            continue
        different += 1
        if len(left) < len(needed) and not differs(left, program, wanted):
            continue  # what is found already explains it
        for fix_id in left:
            if differs([fix_id], program, wanted):
                others = [each for each, fix in CATALOGUE.items() if fix_id in fix.requires]
                if not others or not differs(others, program, wanted):
                    found[fix_id] = count
                    print(json.dumps({"defect": fix_id, "programs": count, "program": str(program)}), flush=True)
        if len(found) == len(needed):
            break
    print(json.dumps({"programs": total, "different": different, "found": len(found), "of": len(needed)}))
    return 0


def applied() -> list[str]:
    """The fixes that this TE needs."""
    from te_graph_fixes.fixes import CATALOGUE
    from te_graph_fixes.source import Source

    source = Source.installed()
    return [fix_id for fix_id, fix in CATALOGUE.items() if fix.verdict(source).verdict == "applicable"]


FINDINGS = ("wrong", "crash")


def breakages(options: argparse.Namespace) -> int:
    """How many programs it takes to find each edit of a fix that is left out."""
    from te_graph_fixes.fixes import CATALOGUE
    from te_graph_fixes.source import Source

    on, source = Server(), Source.installed()
    edits = [
        (fix_id, number) for fix_id in applied() for number, _ in enumerate(CATALOGUE[fix_id].verdict(source).edits)
    ]
    servers: dict[tuple[str, int], Server] = {}
    for fix_id, number in random.Random(options.seed).sample(edits, min(options.breakages, len(edits))):
        try:
            servers[fix_id, number] = Server(breakage=(fix_id, number))
        except ValueError as error:
            print(json.dumps({"fix": fix_id, "edit": number, "refused": str(error)}), flush=True)
    broken, total = len(servers), 0
    for count, program, wanted in equal_programs(on, options):
        total = count
        for (fix_id, number), server in [*servers.items()]:
            if server(program, wanted)["verdict"] in FINDINGS:
                print(json.dumps({"fix": fix_id, "edit": number, "programs": count}), flush=True)
                servers.pop((fix_id, number)).close()
    for fix_id, number in servers:
        print(json.dumps({"fix": fix_id, "edit": number, "not in programs": total}), flush=True)
    print(json.dumps({"breakages": broken, "found": broken - len(servers), "programs": total}))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.explore", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first program is that of this seed")
    parser.add_argument("--programs", type=int, default=100, help="how many, each of the next seed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no program after so many seconds")
    parser.add_argument("--switch", default="", help="TE_GRAPH_FIXES for the programs")
    parser.add_argument("--disable", default="", help="TE_GRAPH_FIXES_DISABLE for the programs")
    parser.add_argument("--scripts", default="", help="the folder for the scripts of what is found")
    parser.add_argument("--no-shrink", dest="shrink", action="store_false", help="leave what is found as it is")
    parser.add_argument("--verbose", action="store_true", help="say the verdict on each program")
    parser.add_argument("--no-fork", action="store_true", help="run programs in one process, as on a GPU")
    parser.add_argument("--defects", action="store_true", help="find the defects of the catalogue, one by one")
    parser.add_argument("--breakages", type=int, metavar="N", help="leave single edits of fixes out, N at random")
    options = parser.parse_args()
    options.gpu = os.environ.get("TE_SIMULATOR_GPU", "hopper")
    os.environ["TE_GRAPH_FIXES"] = "off"  # each server says for itself
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # only servers may use the GPU
    import torch

    warnings.simplefilter("ignore")
    Server.forks = not torch.cuda.is_available() and not options.no_fork
    if not torch.cuda.is_available():
        from tests.simulator import install

        install()
        import transformer_engine.pytorch  # noqa: F401

    if options.defects:
        return defects(options)
    return breakages(options) if options.breakages else find(options)


if __name__ == "__main__":
    sys.exit(main())
