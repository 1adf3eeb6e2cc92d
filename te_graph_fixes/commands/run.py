"""``te-graph-fixes run``: start a program with the fixes active in it and in all its children.

The command sets environment variables, then replaces its own process with the program. Signals, exit status and streams
are therefore the program's own. `launcher/te_graph_fixes_run.py` describes how the variables activate the fixes.
"""

import contextlib
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import signal
import sys
import zipfile
from collections.abc import Sequence

from ..checking import Options
from ..launcher.te_graph_fixes_run import FILTER
from ..patching import TE
from ..settings import CHECK, STRICT, VARIABLES, Settings, is_off, unknown_variables
from ..text import print_stderr
from . import NOT_USABLE

USAGE = """\
usage: te-graph-fixes run [--check[=N[,layers=K][,strict]]] [--] CMD [ARG ...]
       te-graph-fixes run [--check[=...]] --print-env

Start CMD (python, torchrun, a shell script) with the fixes active in it and in all its children. If a needed fix cannot
be applied, importing TransformerEngine raises an error (with TE_GRAPH_FIXES_STRICT=0, a warning).

--check      compare graphs with eager runs in the first N steps (2), and print the mismatches. layers=K checks K layers
             at a time, with less memory. strict ends a process with status 86 at a mismatch.
--print-env  print shell commands that set the environment variables of `run`, for `eval` in a Slurm script

exit status: the status of CMD; 127, 126: CMD was not found, or could not be started; 2: wrong usage or a bad variable
example: te-graph-fixes run torchrun --nproc-per-node 8 pretrain_gpt.py
"""
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LAUNCHER = os.path.join(ROOT, "te_graph_fixes", "launcher")
PRINT_ENV = "--print-env"
_WITHOUT_RUN = "Add `import te_graph_fixes` to the program, or bake TransformerEngine (`te-graph-fixes bake`)."
NOT_EXECUTABLE, NOT_FOUND = 126, 127
_DROPS_VARIABLES = re.compile(
    r"""
    (?<![\w.-]) (?:
        (?: sudo | ssh | su | runuser | docker | podman | kubectl ) (?=\s)
        | --(?: export[=\s]NONE | cleanenv ) (?!\S)
        | env (?: \s-u\s?\w+ | \s\w+=\S* )*? \s (?:
            (?: -\w*i\w* | - | --ignore-environment ) (?!\S) | (?: -u\s? | --unset= ) PYTHON (?:PATH|WARNINGS)
        )
        | (?: python | pypy ) [\d.]* t? (?: \s-[WX]\s?\S+ | \s-[^\WcmWX]+ )*? \s -[^\WcmWX]*[IE]\w*
    )
    """,
    re.VERBOSE,
)
"""Commands that start a program without the variables of ``run``, or a Python that ignores them."""


def main(arguments: Sequence[str]) -> int:
    """Replace this process with the program in ``arguments``. Return an exit status if no program is started."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    options = list(itertools.takewhile(lambda word: word.startswith("-") and word != "--", arguments))
    command = list(arguments[len(options) :])
    if command[:1] == ["--"]:
        del command[0]
    for text in unknown_variables():
        _note(text)
    try:
        Settings.read()
        source_of_check = CHECK
        for option in options:
            name, _, value = option.partition("=")
            if name == "--check":
                source_of_check, os.environ[CHECK] = name, value or "on"
            elif option != PRINT_ENV:
                raise ValueError(f"Unknown option {option}. See `te-graph-fixes run -h`.")
        if source_of_check != CHECK or not is_off():
            Options.parse(os.environ.get(CHECK, ""), source_of_check)
        if PRINT_ENV in options:
            if command:
                raise ValueError(f"{PRINT_ENV} takes no command: its output is for `eval`.")
            sys.stdout.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
            print(*(f"export {name}={shlex.quote(value)}" for name, value in variables().items()), sep="\n")
            return 0
        if not command or not command[0]:
            raise ValueError("There is no command. For example:\n  te-graph-fixes run python train.py")
    except ValueError as error:
        _note(error)
        return NOT_USABLE
    if importlib.util.find_spec(TE) is None:
        _note(f"{sys.executable} has no TransformerEngine. The fixes apply only to a Python that has it.")
    if not is_off():
        for part in unreached(command):
            _note(f"`{part}` drops the environment variables that activate the fixes. {_WITHOUT_RUN}")
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these signals, and the program would inherit this.
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, {**os.environ, **variables()})
    except OSError as error:
        _note(f"Cannot start {command[0]}: {error.strerror}")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE


def variables() -> dict[str, str]:
    """Return the variables that activate the fixes in every Python process, and the settings of this process.

    PYTHONPATH begins with `LAUNCHER`, and PYTHONWARNINGS ends with `FILTER`. A relative path to this package becomes
    absolute, because a child may change its working directory. Strict mode is on unless the user has turned it off.
    """
    inherited = os.environ.get("PYTHONPATH")
    entries = inherited.split(os.pathsep) if inherited else []  # an entry "" would be the current folder
    entries = [ROOT if os.path.abspath(entry) == ROOT else entry for entry in entries if entry != LAUNCHER]
    filters = [item for item in os.environ.get("PYTHONWARNINGS", "").split(",") if item and item != FILTER]
    return {
        "PYTHONPATH": os.pathsep.join([LAUNCHER, *entries]),
        "PYTHONWARNINGS": ",".join([*filters, FILTER]),
        STRICT: "1",
        **{name: os.environ[name] for name in VARIABLES if os.environ.get(name)},
    }


def _note(message: object) -> None:
    print_stderr(f"te-graph-fixes run: {message}")


def unreached(command: Sequence[str]) -> list[str]:
    """Return the parts of a command that drop the environment of ``run``, or [] if no such part is found.

    Programs that the command starts later, for example in a script, are not searched.
    """
    path = shutil.which(command[0]) or command[0]
    found = [match[0] for match in _DROPS_VARIABLES.finditer(" ".join([*command, ";", _interpreter(path)]))]
    return found + [f"the PEX {file}" for file in (path, *command[1:]) if _is_pex(file)]


def _interpreter(path: str) -> str:
    """Return the command in the first line of a script, or "" if the file is no script."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        first = file.readline(1000)
        return first[2:].decode(errors="replace").strip() if first.startswith(b"#!") else ""
    return ""


def _is_pex(path: str) -> bool:
    with contextlib.suppress(OSError, zipfile.BadZipFile):
        return os.path.isfile(path) and zipfile.is_zipfile(path) and "PEX-INFO" in zipfile.ZipFile(path).namelist()
    return False
