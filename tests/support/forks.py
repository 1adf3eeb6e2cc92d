"""``python -m tests.support.forks``: run each requested program on the simulator, in a fork of this process.

A request is a line of JSON on standard input. The answer is a line with the exit status. A request has these keys:

- ``arguments``: the arguments of ``python -m tests.simulator``, or ``-c PROGRAM``
- ``environment``: all environment variables
- ``output``: the files for standard output and standard error
- ``imported``: the modules to import before the program, or []

This process imports torch, and the packages that TransformerEngine (TE) imports, once for all programs. If ``imported``
is not empty, a fork imports these modules, and serves all requests with equal ``imported`` and ``environment``.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterable
from types import ModuleType
from typing import Any, TextIO

from tests.simulator import install
from tests.simulator.__main__ import main as run

IMPORTED = ("torch._dynamo", "torch.distributed.tensor.experimental", "triton", "onnxscript", "pydantic.dataclasses")
LIMIT = 300
"""The time limit of a program in seconds."""
KEPT = 6
"""The largest number of forks with imported modules. When it is exceeded, the least recently used fork is ended."""


def enter(request: dict[str, Any], base: list[str]) -> None:
    """Set the environment and output of this process as if it had been started for the requested program."""
    if "transformer_engine" not in sys.modules:  # after this import, keep the environment, because TE has changed it
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.path[:] = [*os.environ["PYTHONPATH"].split(os.pathsep), *base]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in zip((1, 2), request["output"], strict=True):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)


def execute(arguments: list[str]) -> int:
    """Run one program in this process, and return its exit status."""
    try:
        if arguments[0] == "-c":
            install()
            sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(arguments[1], "<string>", "exec"), vars(sys.modules["__main__"]))
        else:
            run(arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def prepared(request: dict[str, Any], base: list[str]) -> tuple[int, TextIO, TextIO]:
    """Start a fork that imports a request's modules and serves requests. Return its id and pipes to and from it."""
    (theirs, ours), (answers, answered) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        enter(request, base)
        install()
        for name in request["imported"]:
            importlib.import_module(name)
        serve(os.fdopen(theirs), os.fdopen(answered, "w"), base)
        os._exit(0)
    os.close(theirs)
    os.close(answered)
    return child, os.fdopen(ours, "w"), os.fdopen(answers)


def serve(requests: Iterable[str], answers: TextIO, base: list[str]) -> None:
    """Run the requested programs, one after the other, and write each exit status to ``answers``."""
    kept: dict[str, tuple[int, TextIO, TextIO]] = {}
    for line in requests:
        request = json.loads(line)
        if request["imported"] and "transformer_engine" not in sys.modules:
            key = json.dumps([request["environment"], request["imported"]])
            kept[key] = kept.pop(key, None) or prepared(request, base)
            _, ask, answered = kept[key]
            print(line, end="", file=ask, flush=True)
            answer = answered.readline()
            if not answer or len(kept) > KEPT:  # without an answer, an import has failed
                pid, *_ = kept.pop(key if not answer else next(iter(kept)))
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            print(answer or "1\n", end="", file=answers, flush=True)
            continue
        child = os.fork()
        if child == 0:
            signal.alarm(LIMIT)
            enter(request, base)
            status = execute(request["arguments"])
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


if __name__ == "__main__":
    given = os.environ["PYTHONPATH"].split(os.pathsep)
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # garbage collections in forks skip these objects
    serve(sys.stdin, sys.stdout, [entry for entry in sys.path if entry not in given])
