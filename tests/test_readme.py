"""Every command of README.md is run, here or by what `ELSEWHERE` names, and prints what README says it prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.child import ROOT, python
from tests.published import source

PAGE = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [re.sub(r"\s+#.*", "", line[2:]) for block in BLOCKS for line in block.splitlines() if line.startswith("$ ")]

ELSEWHERE = {
    "te-graph-fixes run torchrun --nproc-per-node 8 pretrain_gpt.py ...": "tests/test_run.py",
    "te-graph-fixes run --check torchrun --nproc-per-node 8 pretrain_gpt.py ...": "tests/test_check.py",
    "te-graph-fixes verify": "tests/test_verify.py",
    "pip install tox && tox run -e demo": ".github/workflows/ci.yml",
    "pip install tox && tox run": ".ci/run",
    "pip install .": "tests/test_release.py",
    "pip wheel --no-deps --wheel-dir wheels .": "tests/test_release.py",
    "pip install --no-index --no-deps wheels/te_graph_fixes-*.whl": "tests/test_release.py",
    "pip uninstall -y te-graph-fixes": "not run: pip's own",
}


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - set(ELSEWHERE)))
def test_a_command_prints_what_is_said(command: str, tmp_path: Path) -> None:
    program, *arguments = shlex.split(command)
    assert program == "te-graph-fixes"
    done = python("-m", "te_graph_fixes", *arguments, path=source("2.14.0"))
    assert done.returncode == 0, done.stderr
    (block,) = (block for block in BLOCKS if f"$ {command}\n" in block)
    for line in block.splitlines()[1:]:
        parts = [re.escape(part) for part in line.strip().split("...")]
        assert re.search(".*".join(parts), done.stdout), line


def test_no_command_is_forgotten_or_gone() -> None:
    assert set(ELSEWHERE) <= set(COMMANDS)
    places = [place for place in ELSEWHERE.values() if not place.startswith("not run")]
    assert [place for place in places if not (ROOT / place).is_file()] == []
