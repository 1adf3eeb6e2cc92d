"""Test processes without TransformerEngine (TE), with a missing or old wrapt, with forks, or with options of Python.

The tests with TE use its real sources. `test_activation.py` tests the life cycle on a stand-in.
"""

from __future__ import annotations

import importlib.resources
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from te_graph_fixes.patching.source import Source
from tests.support.child import ROOT, on_simulator, python
from tests.support.published import copy_of

pytestmark = pytest.mark.te

# The start of every child's code: it configures logging, and defines functions for the simulator and the statuses.
SETUP = """
import logging, os, sys
logging.basicConfig(level=logging.INFO, format="LOG %(levelname)s %(message)s")

def simulate():
    from tests.simulator import install
    install()

def statuses():
    import te_graph_fixes
    return {fix: str(status.status) for fix, status in te_graph_fixes.report().fixes.items()}

def count(status):
    return sum(found == status for found in statuses().values())
"""


def child(code: str, path: tuple[Path | str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `SETUP` and ``code`` in a fork of a process that has imported torch. The fork searches ``path`` first."""
    program = SETUP + textwrap.dedent(code)
    return on_simulator("-c", program, path=os.pathsep.join(map(str, path)), imported=(), **variables)


def printed(code: str, path: tuple[Path | str, ...] = (), **variables: str) -> list[str]:
    """Return the lines that ``code`` prints in a child. Fail if the child fails."""
    found = child(code, path=path, **variables)
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with this package and its dependencies, for interpreters that start without site-packages."""
    folder = tmp_path_factory.mktemp("bare")
    for name in ("te_graph_fixes", "wrapt", "packaging"):
        (folder / name).symlink_to(str(importlib.resources.files(name)))
    return folder


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a copy of TE's Python sources and metadata."""
    return copy_of(Path(Source.installed().location).parent, tmp_path_factory.mktemp("te"))


def without_site(bare: Path, code: str) -> subprocess.CompletedProcess[str]:
    return python("-S", "-c", SETUP + textwrap.dedent(code), cwd=Path("/"), PYTHONPATH=str(bare))


def test_without_te(bare: Path) -> None:
    found = without_site(
        bare,
        """
        import te_graph_fixes
        try:
            import transformer_engine.pytorch
        except ModuleNotFoundError as error:
            print(error.name)
        print(te_graph_fixes.report().te_version, set(statuses().values()))
        from te_graph_fixes.commands.cli import main
        print(main(["status"]))
        """,
    )
    assert found.stdout == "transformer_engine\nNone {'pending'}\n2\n", found.stderr
    assert found.stderr == f"te-graph-fixes: transformer_engine is not installed in {sys.executable}\n"


@pytest.mark.parametrize(
    ("wrapt", "problem"),
    [
        ("raise ImportError('none')", "needs wrapt, which is not installed"),
        ("__version__ = '1.15.0'", "needs wrapt 1.16 or later, found 1.15.0"),
    ],
)
def test_a_wrapt_that_is_missing_or_too_old(tmp_path: Path, bare: Path, wrapt: str, problem: str) -> None:
    (tmp_path / "wrapt.py").write_text(wrapt)
    code = """
    for _ in range(2):
        try:
            import te_graph_fixes
        except ImportError as error:
            print(error)
    """
    found = without_site(bare, f"sys.path.insert(0, {str(tmp_path)!r})\n{textwrap.dedent(code)}")
    message = f"te_graph_fixes {problem}. Run: {sys.executable} -m pip install 'wrapt>=1.16,<3'\n"
    assert found.stdout == 2 * message, found.stderr


def test_a_process_that_forks(pristine: Path) -> None:
    code = """
    simulate()
    import te_graph_fixes

    for event in ("imports TE", "takes the fixes back"):
        sys.stdout.flush()
        if os.fork() == 0:
            import transformer_engine.pytorch
            print("child", count("applied") > 0)
            te_graph_fixes.deactivate()
            print("child", count("applied"), flush=True)
            os._exit(0)
        os.wait()
        print("parent", count("applied") > 0)
        import transformer_engine.pytorch
    """
    child = ["child True", "child 0"]
    assert printed(code, path=(pristine,)) == [*child, "parent False", *child, "parent True"]


def test_nothing_is_written_beside_te_or_the_package(pristine: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "te_graph_fixes", tmp_path / "te_graph_fixes")
    before = [(path, path.stat().st_mtime_ns) for folder in (pristine, tmp_path) for path in folder.rglob("*")]
    code = """
    sys.dont_write_bytecode = True
    simulate()
    import te_graph_fixes
    import transformer_engine.pytorch
    print(te_graph_fixes.__file__, count("applied") > 0)
    te_graph_fixes.deactivate()
    """
    assert printed(code, path=(tmp_path, pristine)) == [f"{tmp_path}/te_graph_fixes/__init__.py True"]
    after = [(path, path.stat().st_mtime_ns) for folder in (pristine, tmp_path) for path in folder.rglob("*")]
    assert after == before


@pytest.mark.full
@pytest.mark.parametrize("option", ["-OO", "-I"])
def test_under_options_of_the_interpreter(pristine: Path, option: str) -> None:
    entries = [str(pristine), str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    code = f"""
    sys.path[:0] = {entries!r}
    simulate()
    import te_graph_fixes
    import transformer_engine.pytorch
    print(count("applied") > 0, count("unrecognized"), count("failed"))
    """
    done = python("-W", "ignore::DeprecationWarning", option, "-c", SETUP + textwrap.dedent(code), cwd=Path("/"))
    assert (done.returncode, done.stdout) == (0, "True 0 0\n"), done.stderr
