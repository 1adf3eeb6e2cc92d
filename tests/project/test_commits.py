"""`tools.commits` and `tools.newest` on a repository of two commits with published TransformerEngines (TE)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import te_graph_fixes
from tests.support.published import source
from tools import newest
from tools.commits import PARTS, main

VERSIONS = ("2.12.0", "2.15.0")
PACKAGE = Path(te_graph_fixes.__file__).parent


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("TransformerEngine")
    options = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.invalid")
    subprocess.run(["git", "-C", str(folder), "init", "--quiet", "--initial-branch=main"], check=True)
    for version in VERSIONS:
        shutil.rmtree(folder / "transformer_engine", ignore_errors=True)
        for path in source(version).glob("transformer_engine/**/*.py"):
            copy = folder / path.relative_to(source(version))
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        (folder / PARTS[-1]).parent.mkdir(exist_ok=True)
        (folder / PARTS[-1]).write_text(f"{version}\n")
        subprocess.run(["git", "-C", str(folder), "add", "--all"], check=True)
        subprocess.run(["git", "-C", str(folder), *options, "commit", "--quiet", "-m", f"It is {version}"], check=True)
    return folder


@pytest.mark.parametrize(
    ("old", "new", "printed"),
    [
        ("", "", "0 of 2 commits differ"),
        (" and not calibrating", " and calibrating is False", "calibration-recipe: another text of transformer_engine"),
        pytest.param(
            *(
                "recipe = get_default_fp8_recipe()",
                "recipe = another_recipe()",
                "calibration-recipe: unrecognized -> applicable: ",
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_commits_prints_differences(
    old: str, new: str, printed: str, checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(PACKAGE, tmp_path / "te_graph_fixes", ignore=shutil.ignore_patterns("__pycache__"))
    fix = tmp_path / "te_graph_fixes" / "fixes" / "calibration_recipe.py"
    fix.write_text(fix.read_text().replace(old, new))
    differs = main([str(checkout), str(tmp_path)])
    out = capsys.readouterr().out
    assert printed in out
    assert differs == bool(old)
    assert out.count("It is ") == (2 if old else 0)


def test_newest_reads_a_ref_and_not_the_working_tree(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git = ("git", "-C", str(checkout))
    subprocess.run([*git, "update-ref", "refs/pull/1/merge", "main~1"], check=True)
    text = checkout / "transformer_engine" / "pytorch" / "graph.py"
    before = text.read_text()
    assert newest.main([str(checkout), "--ref", "pull/1/merge", "--ref", "main"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("TransformerEngine ")] == list(VERSIONS)
    subprocess.run([*git, "update-ref", "-d", "refs/pull/1/merge"], check=True)
    assert text.read_text() == before
