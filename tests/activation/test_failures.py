"""Test failures around the package, each in its own process, on TransformerEngine's (TE's) real sources.

`test_activation.py` has the life cycle on a stand-in; here TE, torch and wrapt are missing, old, without source or
imported by many threads at once.
"""

from __future__ import annotations

import importlib.util
import os
import py_compile
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from te_graph_fixes.patching.source import Source
from tests.support.child import on_simulator, python

pytestmark = pytest.mark.te

ROOT = Path(__file__).parents[2]
# What a child runs first: TE on a machine without a GPU, and functions to report by.
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
    """Run ``code`` below `SETUP` on the simulator, in a process that has imported torch and finds ``path`` first."""
    program = SETUP + textwrap.dedent(code)
    return on_simulator("-c", program, path=os.pathsep.join(map(str, path)), imported=(), **variables)


def printed(code: str, path: tuple[Path | str, ...] = (), **variables: str) -> list[str]:
    """Return the lines that ``code`` prints in a child, which must not fail."""
    found = child(code, path=path, **variables)
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()


def location(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with this package and its dependencies, for interpreters that start without site-packages."""
    folder = tmp_path_factory.mktemp("bare")
    for name in ("te_graph_fixes", "wrapt", "packaging"):
        (folder / name).symlink_to(location(name))
    return folder


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of TE's Python sources and metadata."""
    package = Path(Source.installed().location)
    folder = tmp_path_factory.mktemp("te")
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for metadata in package.parent.glob("transformer_engine-*.dist-info"):
        shutil.copytree(metadata, folder / metadata.name)
    return folder


@pytest.fixture
def te(pristine: Path, tmp_path: Path) -> Path:
    """Return a copy of TE that the test may damage."""
    shutil.copytree(pristine, tmp_path / "te")
    return tmp_path / "te"


def without_site(bare: Path, code: str, *more: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": os.pathsep.join(map(str, [bare, *more]))}
    return subprocess.run(
        [sys.executable, "-S", "-c", SETUP + textwrap.dedent(code)],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


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


def test_without_torch(bare: Path, pristine: Path) -> None:
    code = """
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    {first}
    try:
        import transformer_engine.pytorch
    except ModuleNotFoundError as error:
        print(error.name)
    print("torch" in sys.modules)
    """
    plain = without_site(bare, code.format(first=""), pristine)
    ours = without_site(bare, code.format(first="import te_graph_fixes"), pristine)
    assert (ours.stdout, ours.stderr) == (plain.stdout, plain.stderr)
    assert ours.stdout.endswith("False\n")


def test_without_wrapt(tmp_path: Path) -> None:
    for name in ("te_graph_fixes", "packaging"):
        (tmp_path / name).symlink_to(location(name))
    found = without_site(tmp_path, "import te_graph_fixes")
    assert found.returncode == 1
    message = "ImportError: te_graph_fixes needs wrapt, which is not installed. Run: "
    assert found.stderr.splitlines()[-1] == f"{message}{sys.executable} -m pip install 'wrapt>=1.16,<3'"


def test_a_wrapt_that_is_too_old(tmp_path: Path, bare: Path) -> None:
    old = tmp_path / "old" / "wrapt"
    old.mkdir(parents=True)
    (old / "__init__.py").write_text("__version_info__ = ('1', '15', '0')\n__version__ = '1.15.0'\n")
    code = """
    sys.path.insert(0, OLD)
    for _ in range(2):
        try:
            import te_graph_fixes
        except ImportError as error:
            print(error)
    """
    found = without_site(bare, f"OLD = {str(old.parent)!r}\n" + textwrap.dedent(code))
    message = f"te_graph_fixes needs wrapt 1.16 or later, found 1.15.0. Run: {sys.executable} -m pip install"
    assert found.stdout == 2 * f"{message} 'wrapt>=1.16,<3'\n", found.stderr


def test_a_process_that_forks(pristine: Path) -> None:
    code = """
    simulate()
    import te_graph_fixes

    def in_child(work):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            try:
                work()
                sys.stdout.flush()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)

    def imports():
        import transformer_engine.pytorch
        print("child", count("applied") > 0)

    def takes_back():
        print("child", count("applied") > 0)
        te_graph_fixes.deactivate()
        print("child", count("applied"), count("reverted") > 0)

    in_child(imports)
    print("parent", count("pending") == len(statuses()))
    import transformer_engine.pytorch
    in_child(takes_back)
    print("parent", count("applied") > 0)
    """
    assert printed(code, path=(pristine,)) == [
        "child True",
        "parent True",
        "child True",
        "child 0 True",
        "parent True",
    ]


def test_16_threads_import_te_and_the_package_at_once(pristine: Path) -> None:
    code = """
    simulate()
    import threading

    barrier = threading.Barrier(16)
    names = ["te_graph_fixes", "transformer_engine.pytorch", "transformer_engine", "transformer_engine.pytorch.graph"]
    problems = []

    def work(name):
        barrier.wait()
        try:
            __import__(name)
        except BaseException as problem:
            problems.append(repr(problem))

    threads = [threading.Thread(target=work, args=(names[index % len(names)],)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    print(problems, any(thread.is_alive() for thread in threads))
    print(count("applied") > 0, count("pending"), count("unrecognized"), count("failed"))
    """
    assert printed(code, path=(pristine,)) == ["[] False", "True 0 0 0"]


def test_te_without_source(te: Path) -> None:
    graph = te / "transformer_engine" / "pytorch" / "graph.py"
    py_compile.compile(str(graph), cfile=str(graph.with_suffix(".pyc")), doraise=True)
    graph.unlink()
    code = """
    simulate()
    import te_graph_fixes
    import transformer_engine.pytorch
    import importlib
    found = te_graph_fixes.report().fixes
    print({str(found[fix].status) for fix in ("backward-dw-order", "grad-input-lifetime")})
    print("has no source text (" in found["backward-dw-order"].reason)
    te_graph_fixes.activate()
    """
    found = child(code, path=(te,))
    assert found.stdout.splitlines() == ["{'unrecognized'}", "True"], found.stderr
    assert found.stderr.count("TEGraphFixesWarning") == 1
    strict = child(code, path=(te,), TE_GRAPH_FIXES_STRICT="1")
    assert strict.returncode == 1
    assert "FixNotAppliedError" in strict.stderr


def files(folder: Path) -> Iterator[tuple[str, int]]:
    for path in sorted(folder.rglob("*")):
        yield str(path), path.stat().st_mtime_ns


def test_nothing_is_written_beside_te_or_the_package(te: Path, tmp_path: Path) -> None:
    shutil.copytree(location("te_graph_fixes"), tmp_path / "ours" / "te_graph_fixes")
    for folder in (te, tmp_path / "ours"):
        for path in folder.rglob("*"):
            path.chmod(0o555 if path.is_dir() else 0o444)
    before = [*files(te), *files(tmp_path / "ours")]
    code = """
    sys.dont_write_bytecode = True
    simulate()
    import te_graph_fixes
    import transformer_engine.pytorch
    print(te_graph_fixes.__file__, count("applied") > 0)
    te_graph_fixes.deactivate()
    """
    ours = tmp_path / "ours" / "te_graph_fixes" / "__init__.py"
    assert printed(code, path=(tmp_path / "ours", te)) == [f"{ours} True"]
    assert [*files(te), *files(tmp_path / "ours")] == before
    for folder in (te, tmp_path / "ours"):
        for path in folder.rglob("*"):
            path.chmod(0o755)


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
