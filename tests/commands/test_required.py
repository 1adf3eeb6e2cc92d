"""``te-graph-fixes run --required``: a process that has TransformerEngine's library and not the hook ends the job."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from te_graph_fixes.commands import required
from tests.support.child import ROOT

HAVE_TE = """
import mmap, sys, time
with open(sys.argv[1], "rb") as file:
    page = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC)
print("imported", flush=True)
time.sleep(float(sys.argv[2]))
"""
"""A process that maps TransformerEngine's library, as one that has imported it does."""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """That of a TE which the command knows nothing of."""
    path = tmp_path / "transformer_engine_torch.cpython-311.so"
    path.write_bytes(b"x" * 4096)
    return path


def start(*command: str | Path, **environment: str) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TE_GRAPH_FIXES")}
    return subprocess.Popen(
        [sys.executable, "-m", "te_graph_fixes", "run", "--required", *map(str, command)],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_process_with_the_hook_goes_on(library: Path) -> None:
    job = start(sys.executable, "-c", HAVE_TE, library, "7")
    out, err = job.communicate(timeout=60)
    assert (job.returncode, out, err) == (0, "imported\n", "")


WRAPPERS = ["{python} -I", "env -i {python}", "nohup setsid {python} -I", "PYTHONPATH= {python} -E"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_process_without_it_ends_the_job(library: Path, wrapper: str) -> None:
    script = f'{wrapper.format(python=sys.executable)} -c "$0" "$1" 100 & wait'
    begun = time.monotonic()
    job = start("sh", "-c", script, HAVE_TE, library)
    _, err = job.communicate(timeout=60)
    assert job.returncode == required.MISSING, err
    assert "has imported TransformerEngine without the fixes, so the job was ended. Start that Python without -I" in err
    assert time.monotonic() - begun < 30


SCRIPTS = ["{wrapper}", "sleep 0.7; {wrapper}; exec sleep 0.7", "({wrapper} &); exec sleep 3"]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("wrapper", WRAPPERS[:2])
def test_a_short_process_is_seen(library: Path, wrapper: str, script: str) -> None:
    wrapped = f'{wrapper.format(python=sys.executable)} -c "$0" "$1" 0.4'
    job = start("sh", "-c", script.format(wrapper=wrapped), HAVE_TE, library)
    out, err = job.communicate(timeout=60)
    assert (job.returncode, out) == (required.MISSING, "imported\n"), err


def test_a_process_that_becomes_another_is_seen(library: Path) -> None:
    """One with the fixes that executes an interpreter without them keeps its number."""
    become = f"import os, sys; os.execv({sys.executable!r}, ['python', '-I', '-c', *sys.argv[1:]])"
    job = start(sys.executable, "-c", f"import time; time.sleep(1); {become}", HAVE_TE, library, "0.4")
    assert (job.communicate(timeout=60)[0], job.returncode) == ("imported\n", required.MISSING)


def test_a_short_process_with_the_hook_is_right(library: Path) -> None:
    job = start(sys.executable, "-c", HAVE_TE, library, "0.4")
    assert job.communicate(timeout=60) == ("imported\n", "")
    assert job.returncode == 0


def test_who_only_reads_the_library_is_no_suspect(library: Path) -> None:
    job = start("sh", "-c", 'env -i cat "$0" >/dev/null; sleep 0.5; env -i cat "$0" >/dev/null', library)
    assert job.communicate(timeout=60) == ("", "")
    assert job.returncode == 0


def test_a_program_that_imports_the_package_itself_goes_on(library: Path) -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import te_graph_fixes\n{HAVE_TE}"
    job = start("sh", "-c", f'{sys.executable} -I -c "$0" "$1" 2', program, library)
    out, err = job.communicate(timeout=60)
    assert (job.returncode, out) == (0, "imported\n"), err


def test_a_te_that_is_corrected_on_disk_goes_on(library: Path, tmp_path: Path) -> None:
    from te_graph_fixes.commands.cli import main
    from tests.commands.test_bake import copy

    tree = copy(tmp_path / "tree")
    assert main(["bake", "--te", str(tree)]) == 0
    shutil.copy(library, tree / "transformer_engine")
    script = f'{sys.executable} -I -c "$0" "$1" 7'
    job = start("sh", "-c", script, HAVE_TE, tree / "transformer_engine" / library.name)
    assert job.wait(timeout=60) == 0, job.communicate()
    job.communicate()


def test_statuses_and_signals_are_those_of_the_program() -> None:
    for script, status in (("exit 5", 5), ("kill -9 $$", 137)):
        job = start("sh", "-c", script)
        job.communicate(timeout=60)
        assert job.returncode == status
    job = start("no-such-program")
    assert "cannot start no-such-program" in job.communicate(timeout=60)[1]
    assert job.returncode == 127
    job = start(sys.executable, "-c", "import signal, time\nprint(1, flush=True)\nsignal.sigwait({15})\nprint(2)")
    assert job.stdout is not None
    assert job.stdout.readline() == "1\n"
    job.send_signal(signal.SIGTERM)
    assert job.communicate(timeout=60)[0] in ("2\n", "")
    assert job.returncode in (0, 128 + signal.SIGTERM)


def test_off_is_refused() -> None:
    job = start(sys.executable, "-c", "import te_graph_fixes", TE_GRAPH_FIXES="off")
    assert "ValueError: TE_GRAPH_FIXES is off below `te-graph-fixes run --required`" in job.communicate(timeout=60)[1]
    assert job.returncode == 1
