"""``te-graph-fixes run``: start a program with the fixes active in it and in all its children, through the environment.

PYTHONPATH makes every Python below run `launcher/sitecustomize.py` at its start, and that
`launcher/te_graph_fixes_run.py`; where another one stands before it, PYTHONWARNINGS does, by naming a category there.
Then the program takes the place of this process, so that its signals, exit status and streams are its own.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import shlex
import signal
import sys
from collections.abc import Sequence

from ..checking import Options, require_comparable
from ..importing import TE
from ..launcher.te_graph_fixes_run import FILTER
from ..settings import CHECK, COMMAND, STRICT, Settings, unknown_variables

USAGE = f"""\
usage: {COMMAND} run [--check[=N[,layers=K][,strict]]] [--] CMD [ARG ...]
       {COMMAND} run --print-env

Start CMD (python, torchrun, a shell script) with the fixes active in it and in all its children. A fix that is needed
and cannot be applied ends the process that imports TransformerEngine with an error; with TE_GRAPH_FIXES_STRICT=0 it
is a warning.
With --check, compare graphs with eager in the first N steps (2), and print what differs. With layers=K it takes K
layers at a time and less memory. With strict, a process that finds a mismatch ends with the status 86.
With --print-env, print the shell commands that set the variables which do it, for `eval` in a Slurm script.

exit status: that of CMD; 127, 126: CMD was not found, or could not be started; 2: wrong use, or a bad variable
example: {COMMAND} run torchrun --nproc-per-node 8 pretrain_gpt.py
"""
FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "launcher")
BAD_USAGE, NOT_EXECUTABLE, NOT_FOUND = 2, 126, 127


def main(arguments: Sequence[str]) -> int:
    """Become the program that ``arguments`` name; return an exit status where there is none to become."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    options = list(itertools.takewhile(lambda word: word.startswith("-") and word != "--", arguments))
    command = list(arguments[len(options) :])
    if command[:1] == ["--"]:
        del command[0]
    for text in unknown_variables():
        _say(text)
    try:
        settings = Settings.read()
        if list(arguments) == ["--print-env"]:
            Options.parse(os.environ.get(CHECK, ""))
            print(*(f"export {name}={shlex.quote(value)}" for name, value in variables().items()), sep="\n")
            return 0
        for option in options:
            os.environ[CHECK] = _check_of(option)
        if Options.parse(os.environ.get(CHECK, "")):
            require_comparable(settings)
        if not command or not command[0]:
            raise ValueError(f"no command; write for example: {COMMAND} run python train.py")
    except ValueError as error:
        if "--print-env" in arguments:
            print("false")  # so that `eval` fails too
        return _say(error, BAD_USAGE)
    for name in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these at its start, and a program would inherit that
        signal.signal(name, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, {**os.environ, **variables()})
    except OSError as error:
        status = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        return _say(f"cannot start {command[0]}: {error.strerror}", status)


def _check_of(option: str) -> str:
    """The value of `CHECK` for ``--check`` and its forms; ValueError for any other option."""
    name, _, value = option.partition("=")
    if option == "--print-env":
        raise ValueError("--print-env takes nothing beside it: its output is for `eval`")
    if name != "--check":
        raise ValueError(f"unknown option {option}; see {COMMAND} run -h")
    if importlib.util.find_spec(TE) is None:
        _say(f"{sys.executable} has no TransformerEngine: a program that this interpreter runs is not checked")
    return value or "on"


def variables() -> dict[str, str]:
    """PYTHONPATH with our folder at its front, PYTHONWARNINGS with our module at its end, and strict mode."""
    inherited = os.environ.get("PYTHONPATH")
    entries = inherited.split(os.pathsep) if inherited else []  # an empty entry is the current folder
    filters = [item for item in os.environ.get("PYTHONWARNINGS", "").split(",") if item and item != FILTER]
    return {
        "PYTHONPATH": os.pathsep.join([FOLDER, *(entry for entry in entries if entry != FOLDER)]),
        "PYTHONWARNINGS": ",".join([*filters, FILTER]),
        STRICT: os.environ.get(STRICT) or "1",
    }


def _say(message: object, status: int = 0) -> int:
    print(f"te-graph-fixes run: {message}", file=sys.stderr)
    return status
