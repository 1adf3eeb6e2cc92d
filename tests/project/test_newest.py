"""Test `tools.newest` on a repository with a commit for each of two published TransformerEngines (TE)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.published import source
from tools import newest

VERSIONS = ("2.12.0", "2.15.0")


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.invalid")
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True)


def test_newest_reads_a_ref_and_not_the_working_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    version_file, package = tmp_path / newest.PARTS[-1], tmp_path / "transformer_engine"
    version_file.parent.mkdir()
    for version in VERSIONS:
        shutil.rmtree(package, ignore_errors=True)
        shutil.copytree(source(version) / package.name, package, ignore=shutil.ignore_patterns("*.so", "jax"))
        version_file.write_text(f"{version}\n")
        git(tmp_path, "add", "--all")
        git(tmp_path, "commit", "--quiet", "-m", version)
    git(tmp_path, "update-ref", "refs/pull/1/merge", "main~1")
    git(tmp_path, "branch", "release/2.15")
    assert newest.main([str(tmp_path), "--ref", "pull/1/merge", "--ref", "release/2.15"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("TransformerEngine ")] == list(VERSIONS)
    assert version_file.read_text() == f"{VERSIONS[-1]}\n"
