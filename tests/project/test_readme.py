"""The pages of the project: their commands are run here or by what `ELSEWHERE` names, and their tables are made."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from te_graph_fixes.commands.cli import COMMANDS
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.settings import VARIABLES
from te_graph_fixes.status import Status
from te_graph_fixes.verify.cases import CASES
from tests.support.child import ROOT, python
from tests.support.published import source
from tools.tables import PAGES, urls, with_parts

README = (ROOT / "README.md").read_text()
FIRST_SCREEN = "\n".join(README.splitlines()[:40])
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGED = [ROOT, ROOT / "examples", ROOT / "tests" / "simulator", ROOT / "skills" / "te-graph-fixes"]
COMMANDED = [*(page for folder in PAGED for page in sorted(folder.glob("*.md"))), *DOCS]
LINKED = [page for page in COMMANDED if page != ROOT / "CHANGELOG.md"]

CHECKOUT = "PYTHONPATH=CHECKOUT python -m te_graph_fixes"
NOT_RUN = "not run: "
LONG = f"{NOT_RUN}it takes minutes; tests/explore/test_explore.py runs the same with fewer programs"
GPU = f"{NOT_RUN}it needs a GPU; the program is in tests/gpu"
SETS_UP = f"{NOT_RUN}it sets up a machine"
ELSEWHERE = {
    "python3.11 -m venv .venv && . .venv/bin/activate": SETS_UP,
    "pip install -e . tox pre-commit && pre-commit install": SETS_UP,
    "export PYTHONPATH=$PWD PATH=$PWD/.tox/te212/bin:$PATH": SETS_UP,
    'python -m tools.choices_of_fixes "only calibration-recipe"': (
        "tests/fixes/test_choices_of_fixes_on_the_simulator.py"
    ),
    "TE_GRAPH_FIXES=off python -m tests.simulator -m te_graph_fixes.verify.child calibration": (
        "tests/verify/test_verify.py"
    ),
    "TE_GRAPH_FIXES_DISABLE=calibration-recipe python -m tests.simulator -m te_graph_fixes.verify.child calibration": (
        "tests/verify/test_verify.py"
    ),
    "git clone --depth 1 https://github.com/NVIDIA/TransformerEngine te": ".github/workflows/ci.yml",
    "python -m tools.newest; python -m tools.newest te": ".github/workflows/ci.yml",
    "te-graph-fixes bake --overlay /shared/te-fixes": "tests/commands/test_bake.py",
    "te-graph-fixes run torchrun --nproc-per-node 2 examples/gather_reports.py": "tests/activation/test_ranks.py",
    "python tests/gpu/megatron_configs.py router-shared-late fp8-delayed": GPU,
    "torchrun --nproc-per-node 2 tests/gpu/megatron_configs.py overlap-delayed-shared fp8-delayed": GPU,
    "te-graph-fixes run torchrun --nproc-per-node 8 pretrain_gpt.py ...": "tests/commands/test_run.py",
    "te-graph-fixes bake": "tests/commands/test_bake.py",
    "pip install tox && tox run -e demo": ".github/workflows/ci.yml",
    "pip install tox && tox run": ".ci/run",
    "te-graph-fixes run --check torchrun --nproc-per-node 8 pretrain_gpt.py ...": "tests/checking/test_check.py",
    "te-graph-fixes run --check=3,layers=4 torchrun ...": "tests/checking/test_check.py",
    "te-graph-fixes run --check=2,strict torchrun ...": "tests/checking/test_check.py",
    "te-graph-fixes run --check CMD": "tests/checking/test_check.py",
    "TE_GRAPH_FIXES=off te-graph-fixes run --check torchrun --nproc-per-node 8 pretrain_gpt.py ...": (
        "tests/checking/test_check.py"
    ),
    "te-graph-fixes run CMD": "tests/commands/test_run.py",
    "TE_GRAPH_FIXES=off te-graph-fixes run --check CMD": "tests/checking/test_check.py",
    "python -m tools.newest te --ref pull/3353/merge": "tests/project/test_commits.py",
    "python -m tools.tables && python -m tests.project.test_containers": "tests/project/test_containers.py",
    "TE_GRAPH_FIXES=off te-graph-fixes run --check torchrun ...": "tests/checking/test_check.py",
    "python -m tests.explore --seed 0 --programs 500 --scripts found": LONG,
    "python -m tests.explore --switch off --no-shrink": LONG,
    "python -m tests.explore --disable nested-autocast --scripts found": LONG,
    "python -m tests.explore --broken --programs 500 --jobs 16": LONG,
    "python -m tests.explore --broken --pause 0.2 --limit 600": LONG,
    "python -m tests.explore --programs 500 --jobs 16 --results on.jsonl": LONG,
    "python -m tests.explore --equal on.jsonl --defects --jobs 16": LONG,
    "python -m tests.explore --equal on.jsonl --breakages 40 --jobs 16": LONG,
    "python examples/megatron_lm.py ~/Megatron-LM": "tests/clients/test_megatron_lm_example.py",
    "python examples/megatron_moe.py": GPU,
    "TE_GRAPH_FIXES=off python examples/megatron_moe.py": GPU,
    "torchrun --nproc-per-node 8 examples/gather_reports.py": "tests/activation/test_ranks.py",
}


def commands(page: Path) -> list[str]:
    """The lines of ``console`` blocks that begin with a prompt, without their comments.

    A checkout that is not installed stands for the command: `test_readme_s_commands_need_no_installation` runs it.
    """
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [line[2:] for block in blocks for line in block.splitlines() if line[:2] == "$ "]
    return [re.sub(r"\s+#.*", "", line).replace(CHECKOUT, "te-graph-fixes") for line in lines]


HERE = sorted({command for page in COMMANDED for command in commands(page)} - set(ELSEWHERE))


@pytest.mark.parametrize("command", HERE)
def test_a_command_runs(command: str) -> None:
    """``tox`` is asked for what it has, and pytest for tests that it knows."""
    program, *arguments = shlex.split(
        re.sub(r"\.tox/te-sources/([\d.]+)", lambda found: str(source(found[1])), command)
    )
    if program == "tox":
        assert arguments[0] == "run"
        tox = configparser.ConfigParser()
        tox.read(ROOT / "tox.ini")
        known = {"-m": ["rest", "full"], "-e": re.findall(r"[\w-]+", tox["tox"]["labels"])}
        for option, names in zip(arguments[1::2], arguments[2::2], strict=True):
            assert set(names.split(",")) <= set(known[option])
    elif arguments[:2] == ["-m", "pytest"]:
        text = "".join((ROOT / each).read_text() for each in arguments if each.startswith("tests/"))
        words = arguments[arguments.index("-k") + 1].split(" and ") if "-k" in arguments else []
        assert all(word in CASES or f"def test_{word.removeprefix('test_')}" in text for word in words)
    else:
        assert program == "te-graph-fixes" or arguments[:2] == ["-m", "te_graph_fixes"], (
            "name in ELSEWHERE what runs it, or why nothing does"
        )
        arguments = arguments if program == "te-graph-fixes" else arguments[2:]
        done = python("-m", "te_graph_fixes", *arguments, path=source("2.14.0"))
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(("TransformerEngine 2.14.0", "--- /dev/null", "--- a/transformer_engine/"))


def test_no_command_is_forgotten_or_gone() -> None:
    assert set(ELSEWHERE) <= {command for page in COMMANDED for command in commands(page)}
    places = [place for place in ELSEWHERE.values() if not place.startswith(NOT_RUN)]
    assert [place for place in places if not (ROOT / place).is_file()] == []


def test_the_first_screen_says_what_is_wrong_what_to_type_what_it_costs_and_how_to_undo_it() -> None:
    typed = (f"{CHECKOUT} status", f"TE_GRAPH_FIXES=off {CHECKOUT} run --check", f"$ {CHECKOUT} run ", "bake --undo")
    affected = ("make_graphed_callables", "--cuda-graph-impl transformer_engine", "--external-cuda-graph")
    for said in (*typed, *affected, "graphs off", "checkpoint", "all equal", "It costs", "Undo it"):
        assert said in FIRST_SCREEN, said


def test_readme_s_commands_need_no_installation(tmp_path: Path) -> None:
    """In a folder that is not the checkout, with a Python that has nothing but wrapt, packaging and TE."""
    for arguments in (
        ["status"],
        ["run", sys.executable, "-c", "import te_graph_fixes as fixes; print(fixes.report())"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "te_graph_fixes", *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(source("2.14.0"))])},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "warmup-main-grads" in done.stdout


def test_readme_counts_the_silent_kinds_of_misuse() -> None:
    table = (ROOT / "docs" / "limits.md").read_text().partition("## What is still silent")[2].partition("\n## ")[0]
    rows = len(re.findall(r"^\| ", table, re.MULTILINE)) - 1  # less the heading
    assert f"[{rows} kinds of misuse](docs/limits.md#what-is-still-silent)" in README


def test_reference_names_every_command_variable_and_status() -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    assert [name for name in VARIABLES if f"| `{name}` |" not in page] == []
    assert [state for state in Status if state is not Status.APPLICABLE and f"| `{state}` |" not in page] == []
    assert [name for name in COMMANDS if not re.search(rf"^\| `{name}\b", page, re.MULTILINE)] == []


def test_symptoms_names_every_fix() -> None:
    page = (ROOT / "docs" / "symptoms.md").read_text()
    named = {
        name
        for row in re.findall(r"corrected[^|]*\|$", page, re.MULTILINE)
        for name in re.findall(r"`([a-z][a-z\d-]+)`", row)
    }
    assert named == set(CATALOGUE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_made_is_as_it_would_be_made(page: Path) -> None:
    """``python -m tools.tables`` makes it."""
    assert with_parts(page.read_text()) == page.read_text(), "run `python -m tools.tables`"


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_file_that_a_page_names_is_there_or_at_a_commit(page: Path) -> None:
    for paragraph in re.split(r"\n\n|\n- ", page.read_text()):
        if not re.search(r"\b(?:at|commit)\s+[0-9a-f]{7}\b|repository at [0-9a-f]{10}", paragraph):
            named = re.findall(r"(?<![\w/.])(?:tests|tools|examples|te_graph_fixes)/[\w/]+\.py", paragraph)
            assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(((?!https?:)[^)#]*)(?:#([^)]*))?\)", page.read_text()):
        found = page.parent / target if target else page
        assert found.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)", found.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}, anchor


def test_there_is_one_address() -> None:
    repository, issues = urls()["Repository"], urls()["Issues"]
    assert issues.startswith(repository)
    for page in (*COMMANDED, *PAGES):
        made = re.sub(r"<!-- address -->.*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
        assert repository not in made, page
