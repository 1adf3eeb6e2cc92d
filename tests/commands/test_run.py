"""Test ``te-graph-fixes run`` with programs that import a stand-in for TransformerEngine (TE)."""

from __future__ import annotations

import functools
import os
import shlex
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from te_graph_fixes.commands.run import LAUNCHER
from te_graph_fixes.fixes import CATALOGUE
from tests.support.child import ROOT, python
from tests.support.published import source

STATE = "import sys, transformer_engine.pytorch; print('te_graph_fixes' in sys.modules)"
QUIET = {"TE_GRAPH_FIXES_DISABLE": ",".join(CATALOGUE), "TE_GRAPH_FIXES_VERBOSE": "0"}
RUN = [sys.executable, "-m", "te_graph_fixes", "run"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a stand-in for TE in ``site``. The stand-in lacks all functions that fixes search for."""
    for name in ("transformer_engine", "transformer_engine/pytorch"):
        script(tmp_path / "site" / name / "__init__.py", "")
    return tmp_path


@pytest.fixture
def run(folder: Path) -> Run:
    """Return a function that starts a command under ``te-graph-fixes run``, in ``folder``."""
    start = functools.partial(python, "-m", "te_graph_fixes", "run", cwd=folder, path=folder / "site")
    return functools.partial(start, **QUIET)


def first(folder: Path, *paths: str | Path) -> str:
    """Return a value for PYTHONPATH: ``paths``, followed by the folder of the stand-in for TE."""
    return os.pathsep.join(map(str, [*paths, folder / "site"]))


def script(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def outcome(result: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    return result.returncode, result.stdout, result.stderr


def test_without_run_nothing_is_active(folder: Path) -> None:
    assert python("-c", STATE, path=folder / "site").stdout == "False\n"


WORKER = f"""
import multiprocessing, sys

def work():
    {STATE}

if __name__ == "__main__":
    worker = multiprocessing.get_context(sys.argv[1]).Process(target=work)
    worker.start()
    worker.join()
"""
FILES = {
    "job/__init__.py": "",
    "job/sibling.py": "NAME = 'sibling'\n",
    "job/train.py": f"import sibling, sys\nprint(sibling.NAME, *sys.argv[1:], __name__)\n{STATE}\n",
    "job/module.py": STATE,
    "job/worker.py": WORKER,
    "job.sh": f'#!/bin/sh\n"{sys.executable}" -c "{STATE}" | cat\n',
    "warnings.sh": f'#!/bin/sh\nPYTHONWARNINGS=ignore exec "{sys.executable}" -c "{STATE}"\n',
}


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ([sys.executable, "-c", STATE], ""),
        (["--", sys.executable, "-c", STATE], ""),
        ([sys.executable, "job/train.py", "--run", "-- 1"], "sibling --run -- 1 __main__\n"),
        ([sys.executable, "-m", "job.module"], ""),
        (["./job.sh"], ""),
        (["./warnings.sh"], ""),
        *(([sys.executable, "job/worker.py", method], "") for method in ("fork", "spawn", "forkserver")),
    ],
    ids=["code", "separator", "script", "module", "shell", "other warnings", "fork", "spawn", "forkserver"],
)
def test_every_child_process_has_the_fixes(run: Run, folder: Path, command: list[str], printed: str) -> None:
    for name, text in FILES.items():
        script(folder / name, text)
    assert outcome(run(*command)) == (0, f"{printed}True\n", "")


def test_the_package_is_not_imported_before_te(run: Run) -> None:
    code = """
import importlib.util, sys
found = importlib.util.find_spec("transformer_engine") is not None
print(found, "te_graph_fixes" in sys.modules, "sitecustomize" in sys.modules)
"""
    assert outcome(run(sys.executable, "-c", code)) == (0, "True False True\n", "")


def test_a_job_that_lacks_a_fix_ends_with_an_error(run: Run) -> None:
    """The job continues only if strict mode is off, or if the program catches the error."""
    said = (
        f"FixNotAppliedError: {len(CATALOGUE)} fixes that TransformerEngine (version unknown) needs cannot be applied"
    )
    advice = "To run without a fix, add it to TE_GRAPH_FIXES_DISABLE; without all of them, set TE_GRAPH_FIXES_STRICT=0."
    for strict in ({}, {"TE_GRAPH_FIXES_STRICT": ""}):
        done = run(sys.executable, "-c", STATE, TE_GRAPH_FIXES_DISABLE="", **strict)
        assert (done.returncode, done.stdout, done.stderr.count(said)) == (1, "", 1)
        _, _, message = done.stderr.partition(said)
        assert message.splitlines()[1].endswith(advice)
    caught = "try: import transformer_engine.pytorch\nexcept RuntimeError as error: print(type(error).__name__)\n1 / 0"
    done = run(sys.executable, "-c", caught, TE_GRAPH_FIXES_DISABLE="")
    assert done.stdout == "FixNotAppliedError\n"
    assert done.stderr.endswith("\nZeroDivisionError: division by zero\n")
    done = run(sys.executable, "-c", STATE, TE_GRAPH_FIXES_DISABLE="", TE_GRAPH_FIXES_STRICT="0")
    assert (done.returncode, done.stdout) == (0, "True\n")
    assert "<string>:1: TEGraphFixesWarning: " in done.stderr  # The warning names the line of the program.


def test_an_unknown_variable_stops_no_job(run: Run) -> None:
    said = "te-graph-fixes run: Ignoring TE_GRAPH_FIXES_VERSION: te-graph-fixes has no such variable. Did you mean "
    for rank in ("0", "1"):
        done = run(sys.executable, "-c", "print(1)", TE_GRAPH_FIXES_VERSION="1", RANK=rank)
        is_first = rank == "0"
        assert (done.returncode, done.stdout) == (0, "1\n")
        assert (done.stderr.startswith(said), done.stderr.count("\n")) == (is_first, is_first)
    done = run(sys.executable, "-c", STATE, TE_GRAPH_FIXES_VERSION="1")
    assert (done.returncode, done.stdout) == (0, "True\n")
    assert "TEGraphFixesWarning: Ignoring TE_GRAPH_FIXES_VERSION: " in done.stderr


UNREACHED = (
    "drops the environment variables that activate the fixes. Add `import te_graph_fixes` to the program, or bake"
)


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("{python} -I job.py", "-I"),
        ("{python} -W ignore -uE job.py", "-uE"),
        ("env -i {python} job.py", "env -i"),
        ("sh -c 'exec env -u PYTHONPATH -u PYTHONWARNINGS {python} job.py'", "env -u PYTHONPATH"),
        ("./isolated.py", "-I"),
        ("sh -c 'exec env -i {python} job.py; srun --export=NONE python'", "--export=NONE"),
        ("{python} job.py -I", ""),
        ("{python} isolated.py", ""),
        ("env A=b {python} job.py", ""),
    ],
)
def test_parts_of_a_command_that_are_not_reached(run: Run, folder: Path, command: str, part: str) -> None:
    text = f"import sys; sys.path.insert(0, {str(folder / 'site')!r}); {STATE}"
    script(folder / "isolated.py", f"#!{sys.executable} -I\n{text}")
    script(folder / "job.py", text)
    done = run(*shlex.split(command.format(python=sys.executable)))
    assert (done.returncode, done.stdout) == (0, f"{not part}\n"), done.stderr
    assert (UNREACHED in done.stderr) == bool(part)
    assert f"{part}` drops" in done.stderr or not part


def test_a_pex_is_not_reached(run: Run, folder: Path) -> None:
    with zipfile.ZipFile(folder / "job.pex", "w") as archive:
        archive.writestr("PEX-INFO", "{}")
        archive.writestr("__main__.py", "print(1)")
    done = run(sys.executable, "job.pex")
    assert done.stdout == "1\n"
    assert f"`the PEX job.pex` {UNREACHED}" in done.stderr


def test_a_sitecustomize_that_replaces_the_finders(run: Run, folder: Path) -> None:
    text = "import sys\nsys.meta_path[:] = [each for each in sys.meta_path if isinstance(each, type)]\n"
    script(folder / "own" / "sitecustomize.py", text)
    assert outcome(run(sys.executable, "-c", STATE, path=first(folder, "own"))) == (0, "True\n", "")


def test_the_users_own_sitecustomize_runs(run: Run, folder: Path) -> None:
    script(folder / "own" / "sitecustomize.py", "import sys; VALUE = 7; PATH = list(sys.path); NAME = __name__")
    code = (
        "import sitecustomize as own, sys; print(own.VALUE, own.NAME, own.__file__);"
        f"print({LAUNCHER!r} in own.PATH, {LAUNCHER!r} in sys.path)"
    )
    found = run(sys.executable, "-c", f"{code}\n{STATE}", path=first(folder, folder / "own"))
    own = folder / "own" / "sitecustomize.py"
    assert outcome(found) == (0, f"7 sitecustomize {own}\nFalse False\nTrue\n", "")


def test_a_users_sitecustomize_that_fails_is_reported_as_python_does(folder: Path) -> None:
    script(folder / "own" / "sitecustomize.py", "import missing_module")

    def start(*paths: str) -> tuple[int, str, str]:
        return outcome(python("-c", STATE, path=first(folder, *paths, folder / "own"), **QUIET))

    status, state, errors = start()
    assert (status, state) == (0, "False\n")
    assert "Error" in errors
    assert start(LAUNCHER) == (0, "True\n", errors)


@pytest.mark.parametrize("warnings", ["", "error,default::UserWarning"])
def test_another_sitecustomize_that_does_not_import_ours(run: Run, folder: Path, warnings: str) -> None:
    script(folder / "own" / "sitecustomize.py", "import sys; sys.own = True")
    code = f"import sys, os; print(sys.own, sys.warnoptions, os.environ['PYTHONPATH'].count('launcher'))\n{STATE}"
    path = script(folder / "job.sh", f'#!/bin/sh\nPYTHONPATH=own:$PYTHONPATH exec "{sys.executable}" "$@"\n')
    options = [*filter(None, warnings.split(","))]
    found = run(path, "-W", "once", "-c", code, PYTHONWARNINGS=warnings)
    assert outcome(found) == (0, f"True {[*options, 'once']} 1\nTrue\n", "")


def test_a_replaced_path_is_reported(run: Run, folder: Path) -> None:
    path = script(folder / "job.sh", f'#!/bin/sh\nPYTHONPATH="$1" exec "{sys.executable}" -c "{STATE}"\n')
    found = run(path, first(folder, ROOT))
    assert (found.returncode, found.stdout) == (0, "False\n")
    assert found.stderr == "Invalid -W option ignored: invalid module name: 'te_graph_fixes_run'\n"


def test_exit_status_and_streams_are_those_of_the_program(run: Run) -> None:
    code = "import sys; print(sys.stdin.read().upper(), end=''); sys.stderr.write('problem'); sys.exit(3)"
    assert outcome(run(sys.executable, "-c", code, stdin="text")) == (3, "TEXT", "problem")


def test_the_program_takes_the_place_of_run() -> None:
    command = [sys.executable, "-m", "te_graph_fixes", "run", sys.executable, "-c"]
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen([*command, code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == -signal.SIGTERM


def test_signals_that_python_ignores_are_not_ignored_by_the_program(run: Run) -> None:
    command = ["sh", "-c", "grep SigIgn /proc/self/status"]
    plain = subprocess.run(command, capture_output=True, text=True, check=True, restore_signals=True)
    assert run(*command).stdout == plain.stdout


def test_a_run_in_a_run(run: Run) -> None:
    nested = [sys.executable, "-m", "te_graph_fixes", "run", sys.executable, "-c"]
    code = "import os; print(os.environ['PYTHONPATH'], os.environ['PYTHONWARNINGS'])"
    found = run(*nested, code)
    assert found.stdout.count(LAUNCHER) == 1
    assert found.stdout.count("te_graph_fixes_run") == 1


def variables(printed: str) -> dict[str, str]:
    """Return the environment variables of a shell that has evaluated the output of ``run --print-env``."""
    shell = ["sh", "-c", 'set -e; eval "$1"; exec env', "sh", printed]
    found = subprocess.run(shell, env={}, capture_output=True, text=True, check=True).stdout
    return {name: value for name, _, value in (line.partition("=") for line in found.splitlines()) if name != "PWD"}


def test_print_env(run: Run, folder: Path) -> None:
    path = first(folder, folder / "a folder's name; $(false)")
    done = run("--print-env", path=path)
    assert done.returncode == 0
    set_by_it = variables(done.stdout)
    assert set(set_by_it) == {"PYTHONPATH", "PYTHONWARNINGS", "TE_GRAPH_FIXES_STRICT", *QUIET}
    assert set_by_it.pop("PYTHONPATH").startswith(f"{LAUNCHER}:{path}:{ROOT}")
    active = python("-c", STATE, path=f"{LAUNCHER}:{path}", **set_by_it)
    assert outcome(active) == (0, "True\n", "")


def test_print_env_of_a_path_that_is_not_utf_8() -> None:
    environment = os.environb | {b"PYTHONPATH": b"/\xff:" + os.fsencode(ROOT), b"PYTHONIOENCODING": b"utf-8"}
    done = subprocess.run([*RUN, "--print-env"], env=environment, capture_output=True, check=True)
    assert b":/\xff:" in done.stdout


@pytest.mark.parametrize(("option", "value"), [("--check", "on"), ("--check=1,strict", "1,strict")])
def test_print_env_of_a_check(run: Run, folder: Path, option: str, value: str) -> None:
    set_by_it = variables(run(option, "--print-env", path=first(folder, ROOT), TE_GRAPH_FIXES="off").stdout)
    assert (set_by_it["TE_GRAPH_FIXES_CHECK"], set_by_it["TE_GRAPH_FIXES"]) == (value, "off")


def test_a_check_that_cannot_start_stops_no_job_without_fixes(run: Run) -> None:
    """If wrapt or modules of TE are missing, the check cannot start, but the job must still run."""
    without_wrapt = f"import sys; sys.modules['wrapt'] = None; {STATE}"
    for code, reason in (
        (STATE, "check: This TransformerEngine cannot be"),
        (without_wrapt, " te_graph_fixes needs wrapt"),
    ):
        done = run("--check", sys.executable, "-c", code, TE_GRAPH_FIXES="off")
        assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
        assert reason in done.stderr


NEAR = "unknown fix warmup-rest. Did you mean warmup-reset"


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        ("", 2, "There is no command. For example:\n  te-graph-fixes run python train.py\n"),
        ("''", 2, "There is no command."),
        ("--chek ls", 2, "Unknown option --chek. See `te-graph-fixes run -h`.\n"),
        ("--check=x ls", 2, "--check=x is invalid. Valid values: on, off, N, N,layers=K, N,strict"),
        ("--check 3 ls", 127, "Cannot start 3: No such file or directory"),
        ("--print-env ls", 2, "--print-env takes no command"),
        ("--check=x --print-env", 2, "--check=x is invalid."),
        ("no-such-command-anywhere", 127, "Cannot start no-such-command-anywhere: No such file or directory"),
        ("/etc", 126, "Cannot start /etc: Permission denied"),
        ("TE_GRAPH_FIXES=warmup-rest ls", 2, NEAR),
        ("TE_GRAPH_FIXES=warmup-rest --print-env", 2, NEAR),
        ("TE_GRAPH_FIXES_CHECK=two --print-env", 2, "TE_GRAPH_FIXES_CHECK=two is invalid."),
        ("TE_GRAPH_FIXES_CHECK=two ls", 2, "TE_GRAPH_FIXES_CHECK=two is invalid."),
    ],
)
def test_what_cannot_be_started(run: Run, command: str, status: int, message: str) -> None:
    words = shlex.split(command)
    variables = dict(word.split("=") for word in words if word.startswith("TE_"))
    environment = {"TE_GRAPH_FIXES_DISABLE": "", **variables}
    found = run(*words[len(variables) :], path=source("2.12.0"), **environment)
    assert found.returncode == status
    assert message in found.stderr
    assert "Traceback" not in found.stderr
    assert found.stdout == "exit 1\n" * ("--print-env" in words)  # This line ends a script that calls `eval`.


def test_an_interpreter_without_the_package(folder: Path) -> None:
    """A program runs until it imports TE. Each import of TE must raise an error, unless the fixes are turned off."""
    script(folder / "site" / "te_graph_fixes.py", "raise ModuleNotFoundError('not here')")
    code = """
print("works")
for _ in range(2):
    try:
        import transformer_engine.pytorch
    except RuntimeError as error:
        print(error)
"""
    said = (
        f"te-graph-fixes run: {sys.executable} cannot import te_graph_fixes (not here), so TransformerEngine would run "
        "without the fixes. Install te-graph-fixes for this interpreter, or start it without `te-graph-fixes run`.\n"
    )
    done = python("-c", code, path=first(folder, LAUNCHER), cwd=folder)
    assert outcome(done) == (0, f"works\n{said}{said}", "")
    script(folder / "site" / "te_graph_fixes.py", "raise SyntaxError('not for this Python')")
    nonsense = dict.fromkeys(("TE_GRAPH_FIXES_DISABLE", "TE_GRAPH_FIXES_STRICT", "TE_GRAPH_FIXES_CHECK"), "nonsense")
    done = python("-c", code, path=first(folder, LAUNCHER), cwd=folder, TE_GRAPH_FIXES=" OFF", **nonsense)
    assert outcome(done) == (0, "works\n", "")


def test_one_line_if_this_python_has_no_te(run: Run, folder: Path) -> None:
    """Only `run` itself may print the line, not its children."""
    (folder / "site").rename(folder / "gone")
    child = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', 'print(1)'])"
    said = f"te-graph-fixes run: {sys.executable} has no TransformerEngine. "
    found = run(sys.executable, "-c", child, path=folder / "none")
    if "has no TransformerEngine" not in found.stderr:
        pytest.skip("this Python has TransformerEngine")
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (0, "1\n", 1)
    assert found.stderr.startswith(said)


def test_a_relative_path_to_the_package_becomes_absolute(folder: Path) -> None:
    """A child that changes its current folder must still find the package."""
    others = [entry for entry in sys.path if entry and Path(entry) != ROOT]
    path = os.pathsep.join([os.path.relpath(ROOT, folder), str(folder / "site"), *others])
    environment = {**os.environ, "PYTHONPATH": path, **QUIET}
    command = [sys.executable, "-m", "te_graph_fixes", "run", "sh", "-c", f'cd / && "{sys.executable}" -c "{STATE}"']
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert outcome(done) == (0, "True\n", "")
