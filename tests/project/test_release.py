"""Build the release twice, inspect it, and install it without an index next to TransformerEngine (TE)."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from te_graph_fixes.decision import read
from te_graph_fixes.patching.source import Source
from te_graph_fixes.status import Verdict
from te_graph_fixes.version import NEXT
from tests.support.published import COVERED, copy_of, source
from tools import patches
from tools.tables import urls

pytest.importorskip("build")
ROOT = Path(__file__).parents[2]
NAME = f"te_graph_fixes-{NEXT}.dev0"
"""The name of a build from a copy without git."""


def tracked(*folders: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def build(folder: Path, umask: int = 0o022) -> Path:
    """Copy the tracked files to ``folder``. Build the sdist and, from it, the wheel. Return the folder of both."""
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(folder)]
    subprocess.run(command, check=True, capture_output=True, umask=umask)
    return folder / "dist"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / f"{NAME}-py3-none-any.whl"


def test_two_builds_are_identical(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    again = build(tmp_path_factory.mktemp("somewhere") / "else", umask=0o077)
    assert sorted(path.name for path in dist.iterdir()) == [f"{NAME}-py3-none-any.whl", f"{NAME}.tar.gz"]
    for path in dist.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


def test_the_wheel_contains_only_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    metadata = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    made = "te_graph_fixes/_version.py"
    assert names == {made, *tracked("te_graph_fixes"), *(f"{NAME}.dist-info/{name}" for name in metadata)}
    assert {"te_graph_fixes/py.typed", "te_graph_fixes/launcher/sitecustomize.py"} < names


def test_the_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read(f"{NAME}.dist-info/METADATA"))
    assert sorted(metadata.get_all("Requires-Dist", [])) == ["packaging", "wrapt<3,>=1.16"]
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_payload(decode=True) == (ROOT / "README.md").read_bytes()
    assert metadata.get_all("Project-URL") == [f"{name}, {url}" for name, url in urls().items()]


def git(*arguments: str, folder: Path = ROOT) -> str:
    who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.invalid")
    done = subprocess.run(["git", *who, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_checkout_build_and_changelog_have_the_same_next_version() -> None:
    assert f'fallback-version = "{NEXT}.dev0"' in (ROOT / "pyproject.toml").read_text()
    assert f"\n## [{NEXT}] - unreleased" in (ROOT / "CHANGELOG.md").read_text()


VERSION = "import te_graph_fixes; print(te_graph_fixes.__version__)"


def version_of(folder: Path) -> str:
    """Return the version of te_graph_fixes that a Python imports with ``folder`` on its path."""
    environment = {"PYTHONPATH": str(folder), "TE_GRAPH_FIXES": "off"}
    command = [sys.executable, "-c", VERSION]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_versions_of_commits_differ(tmp_path: Path) -> None:
    """A build must have the version of its tag or commit, and a copy without git the development version."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    dist = build(checkout)
    assert version_of(checkout) == f"{NEXT}.dev0"  # from `_version.py`, which the build wrote
    shutil.rmtree(dist)
    git("init", "--quiet", "--initial-branch=main", folder=checkout)
    git("add", "--all", folder=checkout)
    git("commit", "--quiet", "-m", "One", folder=checkout)
    one = git("rev-parse", "HEAD", folder=checkout)[:9]
    assert version_of(checkout) == f"{NEXT}.dev0+g{one}"
    built = built_version(checkout)
    assert built.endswith(f"+g{one}")
    git("tag", "v9.8.7", folder=checkout)
    assert built_version(checkout) == "9.8.7"


def built_version(checkout: Path) -> str:
    """Build a wheel through an sdist, and return its version. Fail if the wheel's name contains another version."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(checkout.parent / "dist"), "."]
    shutil.rmtree(checkout.parent / "dist", ignore_errors=True)
    subprocess.run(command, cwd=checkout, check=True, capture_output=True)
    (wheel,) = (checkout.parent / "dist").glob("*.whl")
    folder = checkout.parent / "installed"
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    found = version_of(folder)
    assert wheel.name == f"te_graph_fixes-{found}-py3-none-any.whl"
    return found


def test_the_sdist_can_be_tested(dist: Path) -> None:
    with tarfile.open(dist / f"{NAME}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml", "tox.ini", "mkdocs.yml"}
    folders = "te_graph_fixes", "tests", "tools", "docs", "examples", "skills", "upstream"
    assert {*wanted, *tracked(*folders)} <= names


def test_the_page_renders(dist: Path) -> None:
    pytest.importorskip("twine")
    check = [sys.executable, "-m", "twine", "check", "--strict", *map(str, dist.iterdir())]
    found = subprocess.run(check, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_patches_of_a_release(tmp_path: Path) -> None:
    patches.write(tmp_path / "patches", *COVERED)
    check = ["sha256sum", "--check", "--strict", patches.SUMS]
    checked = subprocess.run(check, cwd=tmp_path / "patches", capture_output=True, text=True, check=True)
    assert checked.stdout.splitlines() == [f"transformer_engine-{version}.patch: OK" for version in COVERED]
    for version in COVERED:
        tree = copy_of(source(version), tmp_path / version)
        apply = ["patch", "-p1", "--fuzz=0", "-i", str(tmp_path / "patches" / f"transformer_engine-{version}.patch")]
        subprocess.run(apply, cwd=tree, capture_output=True, check=True)
        words = [found.verdict for found in read(Source.at(tree)).assessments.values()]
        assert set(words) <= {Verdict.NOT_NEEDED, Verdict.NOT_APPLICABLE}, version


def test_an_installation_without_an_index(wheel: Path, tmp_path: Path) -> None:
    """Like a container without a network, the environment has only a folder of wheels and an installed TE."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "download", "--quiet", "--dest", str(tmp_path / "wheels"), "wrapt<3", "packaging"], check=True
    )
    shutil.copy(wheel, tmp_path / "wheels")
    venv.create(tmp_path / "venv", with_pip=True)
    bin_folder = tmp_path / "venv" / "bin"
    (site,) = (tmp_path / "venv" / "lib").glob("python3*/site-packages")
    (site / "te.pth").write_text(str(source("2.12.0")))
    environment = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "HOME": str(tmp_path)}

    def start(*command: str, status: int = 0) -> Sequence[str]:
        found = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert found.returncode == status, found.stdout + found.stderr
        return found.stdout.splitlines()

    before = set(start("pip", "list", "--format=freeze"))
    start("pip", "install", "--quiet", "--no-index", "--find-links", "wheels", "te-graph-fixes")
    added = set(start("pip", "list", "--format=freeze")) - before
    assert sorted(line.split("==")[0] for line in added) == ["packaging", "te-graph-fixes", "wrapt"]
    lines = start("te-graph-fixes", "status")
    assert lines[0].startswith("TransformerEngine 2.12.0 has ")
    assert any(line.split()[:1] == ["warmup-reset"] for line in lines)
    assert "--- a/transformer_engine/pytorch/graph.py" in start("te-graph-fixes", "diff")
    finders = "import sys; print(*(type(finder).__name__ for finder in sys.meta_path))"
    assert "Activator" in start("te-graph-fixes", "run", "python", "-c", finders)[0].split()
