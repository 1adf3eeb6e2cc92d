"""Test that the site of docs/ has every page in a menu, and that a broken link is an error (`tox run -e docs`)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.child import ROOT

pytestmark = pytest.mark.te

pytest.importorskip("mkdocs")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    return tmp_path


def build(project: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(project / "site")]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)


def test_the_site_has_every_page_and_a_search(project: Path) -> None:
    done = build(project)
    assert done.returncode == 0, done.stderr
    index = (project / "site" / "search" / "search_index.json").read_text()
    assert "Could not infer dtype of _WeakRefTensor" in index
    for page in (project / "docs").rglob("*.md"):
        address = page.relative_to(project / "docs").with_suffix("")
        folder = address.parent if address.name == "README" else address
        assert (project / "site" / folder / "index.html").exists(), page


@pytest.mark.parametrize("target", ["nowhere.md", "check.md#nothing-of-the-kind", "../README.md"])
def test_a_broken_link_is_an_error(project: Path, target: str) -> None:
    page = project / "docs" / "how.md"
    page.write_text(f"{page.read_text()}\n[a link]({target})\n")
    done = build(project)
    assert done.returncode == 1
    assert target in done.stderr


def test_a_page_without_a_menu_entry_is_an_error(project: Path) -> None:
    (project / "docs" / "new.md").write_text("# New\n")
    assert build(project).returncode == 1
