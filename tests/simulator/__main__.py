"""``python -m tests.simulator [-m MODULE | SCRIPT.py] ARGS``: run a program as ``__main__`` on the simulator."""

from __future__ import annotations

import os
import runpy
import sys

from . import install

USAGE = "usage: python -m tests.simulator (SCRIPT.py | -m MODULE) [ARGS ...]"


def main(arguments: list[str]) -> None:
    """Install the simulator, then run the script or module that ``arguments`` names, with the remaining arguments."""
    as_module = arguments[:1] == ["-m"]
    program = arguments[1:] if as_module else arguments
    if not program or program[0].startswith("-"):
        sys.exit(USAGE)
    install()
    sys.argv = program
    if as_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(program[0])))
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
