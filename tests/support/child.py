"""Functions that run programs in child processes, with TransformerEngine (TE) on the simulator."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.verify.cases import BLACKWELL_RECIPES, PRESWIZZLE, Case
from tests.verify.runner import Outcome

ROOT = Path(__file__).parents[2]
START = "from tests.support.training import *\n"
"""The line that `run_program` inserts before a program."""
TE = ("te_graph_fixes", "transformer_engine.pytorch", "tests.support.training")
"""The modules that most programs import. With the fixes, this import takes longer than a program itself."""
CHILD = "tests.verify.child"
OF_CASES = "tests.verify.programs"
"""The module that most cases of `verify` import."""
Cli = Callable[..., tuple[int, str, str]]
"""A function that runs a command of the package, and returns its exit status, output and errors."""


def _environment(path: str | Path, changed: dict[str, str]) -> dict[str, str]:
    """Return the environment of a child process that searches ``path`` first.

    The process has only the settings of this package that ``changed`` contains.
    """
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("TE_GRAPH_FIXES", "PYTEST_"))
    }
    paths = [str(path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**inherited, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **changed}


def python(
    *arguments: str | Path,
    path: str | Path = "",
    cwd: Path = ROOT,
    timeout: float = 300,
    stdin: str | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run Python in a child process for at most ``timeout`` seconds, and return the completed process.

    The process searches ``path`` first, and has only the settings of this package that ``environment`` contains.
    """
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=_environment(path, environment),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@functools.cache
def _forks() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.forks"],
        cwd=ROOT,
        env=_environment("", {"PYTHONPATH": str(ROOT)}),  # each child sets its own PYTHONPATH
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def on_simulator(
    *arguments: str | Path, path: str | Path = "", imported: Sequence[str] = TE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program as ``python -m tests.simulator`` does, and return the completed process.

    The program runs in a fork of a process that has already imported torch. ``-c PROGRAM`` runs the text of a program.
    The modules ``imported`` are imported once for all programs in the same environment. If ``imported`` is empty, the
    program itself imports TE, and prints which fixes were applied.
    """
    assert importlib.util.find_spec("torch"), "torch is missing. Mark tests that need it: `pytestmark = pytest.mark.te`"
    with tempfile.TemporaryDirectory() as folder:
        output = [Path(folder, name) for name in ("stdout", "stderr")]
        request = {
            "arguments": [*map(str, arguments)],
            "environment": _environment(path, environment),
            "imported": imported,
            "output": [*map(str, output)],
        }
        server = _forks()
        assert server.stdin is not None
        assert server.stdout is not None
        print(json.dumps(request), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        texts = [file.read_text() for file in output]
    return subprocess.CompletedProcess(request["arguments"], status, *texts)


def simulate(*arguments: str | Path, path: str | Path = "", imported: Sequence[str] = TE, **environment: str) -> str:
    """Return the output of a program on the simulator. Fail unless its exit status is 0."""
    done = on_simulator(*arguments, path=path, imported=imported, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_program(program: str, **options: Any) -> str:
    """Return the output of a program that uses the names of `tests.support.training`. Fail unless its status is 0."""
    return simulate("-c", START + program, **options)


def gpu(case: Case) -> str:
    """Return the simulated GPU of a case: Hopper, or a Blackwell for the cases that Hopper cannot run."""
    if PRESWIZZLE in case.fixes:
        return "blackwell-rtx"
    return "blackwell" if case.options.get("recipe") in BLACKWELL_RECIPES else "hopper"


def measured(*cases: str | Case, path: str | Path = "", **environment: str) -> dict[str, Any]:
    """Run the cases on the simulator. Return the parsed line of `tests.verify.child` for each case, by the case's name.

    If a case ends the process, a new process runs the remaining cases.
    """
    found: dict[str, Any] = {}
    while left := [each for each in cases if getattr(each, "name", each) not in found]:
        given = [case if isinstance(case, str) else case.to_json() for case in left]
        done = on_simulator("-m", CHILD, *given, path=path, imported=(CHILD, OF_CASES), **environment)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert lines, done.stderr
        found |= {line["case"]: line for line in lines}
    return found


def outcome(case: Case, **environment: str) -> Outcome:
    """Return the outcome of one case, run in a child process of `verify`."""
    line = measured(case, **environment)[case.name]
    return Outcome(**{name: value for name, value in line.items() if name not in ("case", "last")})
