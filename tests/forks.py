"""``python -m tests.forks``: run each program that standard input asks for on the simulator, in a fork of this process.

A request is a line of JSON: ``arguments`` as for ``python -m tests.simulator``, or ``-c PROGRAM``; ``environment``, all
of it; ``output``, the files for standard output and error. The answer is a line with the exit status. Torch is imported
here, once for all, and what TransformerEngine imports beside it; nothing of TransformerEngine and of te_graph_fixes is.
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
from types import ModuleType
from typing import Any

from .simulator import install
from .simulator.__main__ import main as run

IMPORTED = ("torch._dynamo", "torch.distributed.tensor.experimental", "triton", "onnxscript", "pydantic.dataclasses")
LIMIT = 300
"""Seconds that a program may take."""


def execute(request: dict[str, Any], base: list[str]) -> int:
    """Run the program in this process, which is for it alone; its exit status."""
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:] = [*os.environ["PYTHONPATH"].split(os.pathsep), *base]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in zip((1, 2), request["output"], strict=True):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)
    arguments = request["arguments"]
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


def serve() -> None:
    given = os.environ["PYTHONPATH"].split(os.pathsep)
    base = [entry for entry in sys.path if entry not in given]
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            signal.alarm(LIMIT)
            status = execute(json.loads(line), base)
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # no fork looks through what is here
    serve()
