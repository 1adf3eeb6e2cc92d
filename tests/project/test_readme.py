"""Test that the commands on the pages run, that their numbers agree, and that their links and tables are current."""

from __future__ import annotations

import ast
import configparser
import functools
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from te_graph_fixes.commands.cli import COMMANDS
from te_graph_fixes.fix import OLDEST
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.settings import VARIABLES
from te_graph_fixes.status import Status
from te_graph_fixes.version import NEXT
from tests.support.child import ROOT, python
from tests.support.published import VERSIONS, needed, source
from tests.verify.cases import CASES
from tools.tables import CONTAINERS, PAGES, urls, with_parts

README = (ROOT / "README.md").read_text()
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGED = [ROOT, ROOT / "examples", ROOT / "tests" / "simulator", ROOT / "skills" / "te-graph-fixes", ROOT / "upstream"]
COMMANDED = [*(page for folder in PAGED for page in sorted(folder.glob("*.md"))), *DOCS]
LINKED = [page for page in COMMANDED if page != ROOT / "CHANGELOG.md"]

CHECKOUT = "PYTHONPATH=CHECKOUT python -m te_graph_fixes"
NOT_RUN = "not run: "
SETS_UP = f"{NOT_RUN}it sets up a machine"
ELSEWHERE = {
    'pip install --no-deps . && python -c "import wrapt, packaging"': SETS_UP,
    "python3.11 -m venv .venv && . .venv/bin/activate": SETS_UP,
    "pip install -e . tox pre-commit && pre-commit install": SETS_UP,
    "export PYTHONPATH=$PWD PATH=$PWD/.tox/te212/bin:$PATH": SETS_UP,
    "pip install tox && tox run -e demo": ".github/workflows/ci.yml",
    "git clone --depth 1 https://github.com/NVIDIA/TransformerEngine te": ".github/workflows/ci.yml",
    "python -m tools.newest; python -m tools.newest te": ".github/workflows/ci.yml",
    "python -m tools.newest te --ref pull/3353/merge": "tests/project/test_newest.py",
    "python -m tools.tables": "tests/project/test_readme.py",
    "te-graph-fixes bake": "tests/commands/test_bake.py",
    "te-graph-fixes run --check": "tests/checking/test_check.py",
    "te-graph-fixes run ": "tests/commands/test_run.py",
    "python -m tests.simulator -m tests.verify.child calibration": "tests/verify/test_verify.py",
    "python -m tests.explore": "tests/explore/test_explore.py",
    "python examples/megatron_moe.py": f"{NOT_RUN}it needs a GPU; the program is in examples",
    "python examples/": "tests/clients/test_megatron_lm_example.py",
}
"""Beginnings of commands that `test_a_command_runs` omits, with the file that runs them or the reason if none does."""


def beginning_of(command: str) -> str | None:
    """Return the key in `ELSEWHERE` for a command, which may set variables of the package, or None."""
    program = re.sub(r"^(TE_GRAPH_FIXES\w*=\S+ )+", "", command)
    return next(filter(program.startswith, ELSEWHERE), None)


def commands(page: Path) -> list[str]:
    """Return the lines of ``console`` blocks that begin with a prompt, without prompts and comments.

    A command that runs the package from a checkout is replaced by the installed command.
    """
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [line[2:] for block in blocks for line in block.splitlines() if line[:2] == "$ "]
    return [re.sub(r"\s+#.*", "", line).replace(CHECKOUT, "te-graph-fixes") for line in lines]


COMMANDS_OF_PAGES = sorted({command for page in COMMANDED for command in commands(page)})
HERE = [command for command in COMMANDS_OF_PAGES if beginning_of(command) is None]


@pytest.mark.parametrize("command", HERE)
def test_a_command_runs(command: str) -> None:
    """Environments of tox and tests of pytest must exist. Each other command must run, on TransformerEngine 2.14.0."""
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
            "add the command to ELSEWHERE, with the test that runs it or the reason why no test does"
        )
        arguments = arguments if program == "te-graph-fixes" else arguments[2:]
        done = python("-m", "te_graph_fixes", *arguments, path=source("2.14.0"))
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(("TransformerEngine 2.14.0", "--- /dev/null", "--- a/transformer_engine/"))


def test_elsewhere_names_existing_commands_and_tests() -> None:
    assert {*map(beginning_of, COMMANDS_OF_PAGES)} - {None} == set(ELSEWHERE)
    places = [place for place in ELSEWHERE.values() if not place.startswith(NOT_RUN)]
    assert [place for place in places if not (ROOT / place).is_file()] == []


def test_readme_s_commands_need_no_installation(tmp_path: Path) -> None:
    """The commands must run outside the checkout, with the checkout and TransformerEngine on PYTHONPATH."""
    for arguments in (
        ["status"],
        ["run", sys.executable, "-c", "import te_graph_fixes as fixes; print(fixes.report())"],
    ):
        done = python("-m", "te_graph_fixes", *arguments, path=source("2.14.0"), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "warmup-main-grads" in done.stdout


def rows(page: str, heading: str, column: str) -> list[list[str]]:
    """Return the rows of a section's table whose header contains ``column``, each as a list of cells."""
    section = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", page, re.MULTILINE | re.DOTALL)
    assert section, heading
    (table,) = [
        lines
        for block in re.findall(r"(?:^\|.*\n)+", section[1], re.MULTILINE)
        if column in (lines := block.splitlines())[0]
    ]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table[2:]]


def doc(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def figures_of_mistakes() -> list[str]:
    kinds = len(rows(doc("limits.md"), "Wrong without an error", "action of the program"))
    return [f"[{kinds} mistakes](docs/limits.md#wrong-without-an-error)"]


def figures_of_random_programs() -> list[str]:
    page = doc("maintainers/explorer.md")
    counts, legal = {True: Counter[str](), False: Counter[str]()}, True
    for on, _, _, equal, raised, _, wrong in rows(page, "The last campaign", "commit"):
        if on.startswith("**"):
            legal = "keep" in on
        elif "simulat" not in on:
            counts[legal].update(checked=int(equal) + int(raised) + int(wrong), differ=int(wrong))
    checked, differ = counts[True]["checked"], counts[True]["differ"]
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
    causes = (*words, "thirteen", "fourteen", "fifteen")[len(rows(page, "The differences", "seeds"))]
    assert counts[False]["differ"] == 0
    assert f"{differ} of {checked:,} random programs that keep" in page
    none_wrong = f"None of {counts[False]['checked']:,} programs that break them is wrong without an error"
    assert none_wrong in page.replace("\n", " ")
    programs = f"{differ} of {checked:,} random programs"
    return [f"[{programs}](docs/results/README.md#random-programs)", f"for {causes} reasons"]


def figures_of_megatron_core() -> list[str]:
    table = rows(doc("results/megatron.md"), "Models of Megatron-Core", "trainings refused by Megatron")
    trained, equal = (sum(int(row[column]) for row in table) for column in (3, 4))
    assert trained == equal
    return [f"[{trained} trainings](docs/results/megatron.md#models-of-megatron-core)"]


def figures_of_cost() -> list[str]:
    page = doc("results/cost.md")
    steps = rows(page, "A training step", "fixed / off")
    slower = [float(off.split()[0]) / float(graphs.split()[0]) for _, _, off, graphs, *_ in steps]
    by_size = [float(row[6].split()[0]) for row in steps]
    peaks = [[int(peak) for peak in row[7].split(", ")] for row in steps]
    assert all(fixed <= graphs for _, graphs, fixed in peaks)
    summary = {row[0]: row[1:] for row in rows(page, "What the fixes cost", "quantity")}
    step = [float(cell.split()[0]) for cell in summary["a training step, compared with TE's graphs (all sizes)"]]
    first = max(float(cell) for cell in summary["the first capture of dense layers in a process"])
    return [
        f"[{min(slower):.0f} to {max(slower):.0f} times as long](docs/results/cost.md)",
        f"[about {100 * (step[0] - 1):.0f} % slower](docs/results/cost.md) on TE 2.12.0",
        f"{100 * (1 - step[1]):.0f} % faster on TE 2.20.2",
        f"a step takes {100 * (1 - min(by_size)):.0f} % less to {100 * (max(by_size) - 1):.0f} % more time",
        f"needs up to {100 * (first - 1):.0f} % more memory",
    ]


def figures_of_containers() -> list[str]:
    counts = [row[2] for row in rows(doc("images.md"), "Containers", "container") if row[2]]
    fixes = [int(count.split()[0]) for count in counts]
    names = [name for name, version, _ in CONTAINERS if name.startswith("NeMo") and version]
    first, last = names[0].split()[1], names[-1].split()[-1]
    count = f"{min(fixes)} to {max(fixes)} of the {len(CATALOGUE)} fixes"
    return [f"{first} to {last} need [{count}](docs/images.md#containers)"]


def figures_of_the_newest_te() -> list[str]:
    return [f"TE {VERSIONS[-1]} still has {len(needed(VERSIONS[-1]))} of the {len(CATALOGUE)} bugs"]


def figures_of_versions() -> list[str]:
    pythons = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    page = doc("results/megatron.md")
    table = rows(page, "Models of Megatron-Core", "trainings refused by Megatron")
    megatron = sorted({version for row in table for version in re.findall(r"\b0\.(\d+)\.\d+", row[1])})
    newest = ".".join(VERSIONS[-1].split(".")[:2])
    return [
        f"**Supported:** TE {OLDEST} to {newest} and main;",
        f"Python {pythons[0]} to {pythons[-1]} ",
        f"[measured](docs/results/megatron.md) with 0.{megatron[0]} to 0.{megatron[-1]}",
    ]


@pytest.mark.parametrize(
    "figures",
    [
        figures_of_mistakes,
        figures_of_random_programs,
        figures_of_megatron_core,
        figures_of_cost,
        figures_of_containers,
        figures_of_the_newest_te,
        figures_of_versions,
    ],
)
def test_readme_s_figures_are_those_of_the_linked_page(figures: Callable[[], list[str]]) -> None:
    text = README.replace("\n", " ")
    for figure in figures():
        assert re.sub(r"\s+", " ", figure) in re.sub(r"\s+", " ", text), figure


def test_readme_s_versions_are_those_of_the_fixes() -> None:
    table = rows(README, "Could I be affected?", "symptom")
    assert {row[2]: row[1] for row in table} == {row[2]: CATALOGUE[row[2].strip("`")].versions for row in table}


def test_readme_shows_the_output_of_status() -> None:
    done = python("-m", "te_graph_fixes", "status", path=source("2.12.0"))
    assert f"$ te-graph-fixes status\n{done.stdout.splitlines()[0]}\n" in README


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "launchers.md"], ids=lambda page: page.name)
def test_a_page_shows_the_line_of_run(page: Path) -> None:
    """The line must have current numbers. Its words are tested in tests/activation/test_messages.py."""
    applied = len(needed("2.12.0"))
    line = (
        rf"te-graph-fixes: host=\S+ rank=\d+ te=2.12.0 package={NEXT} mode=memory applied={applied} missing=0 digest="
    )
    assert re.search(rf"^ *{line}[0-9a-f]{{8}}$", page.read_text(), re.MULTILINE)


def test_readme_shows_the_output_of_the_check() -> None:
    shown = re.findall(r"^te-graph-fixes check: .*", README, re.MULTILINE)
    assert shown
    assert [line for line in shown if line not in doc("check.md")] == []


def test_reference_names_every_command_variable_and_status() -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    assert [name for name in VARIABLES if f"| `{name}` |" not in page] == []
    assert [state for state in Status if f"| `{state}` |" not in page] == []
    assert [name for name in COMMANDS if not re.search(rf"^\| `{name}\b", page, re.MULTILINE)] == []


def test_symptoms_names_every_fix_and_its_versions() -> None:
    named = set()
    for symptom, versions, _, fix in re.findall(
        r"^\| (.*?) \| (.*?) ?\| (.*?) \| (.*?) \|$", doc("symptoms.md").partition("## What your")[0], re.MULTILINE
    ):
        fixes = [CATALOGUE[name] for name in re.findall(r"`([a-z][a-z\d-]+)`", fix) if name in CATALOGUE]
        named |= {each.id for each in fixes}
        assert not fixes or versions == united([each.versions for each in fixes]), symptom
    assert named == set(CATALOGUE)


def united(versions: list[str]) -> str:
    """Return the range from the first to the last version of ranges such as ``2.10 to 2.16`` and ``2.15 to main``."""
    ends = [(text.split(" to ")[0], text.split(" to ")[-1]) for text in versions]
    order = lambda end: 99 if end == "main" else int(end.split(".")[1])  # noqa: E731
    first, last = min((end[0] for end in ends), key=order), max((end[1] for end in ends), key=order)
    return first if first == last else f"{first} to {last}"


def quoted_errors() -> list[str]:
    first = [row[0] for row in rows(doc("limits.md"), "What raises an error", "error text")]
    warned = doc("limits.md").partition("Three other mistakes cause one warning")[2].partition("\n\n")[0]
    return [quote for cell in [*first, warned] for quote in re.findall(r"`([^`]{12,})`", cell)]


@pytest.mark.parametrize("quote", quoted_errors())
def test_a_quoted_error_is_one_of_the_package(quote: str) -> None:
    pattern = re.sub(r"\\?…|\\?\.\.\.", ".*?", re.escape(quote))
    assert any(re.search(pattern, text, re.DOTALL) for text in texts_of_errors()), quote


@functools.cache
def texts_of_errors() -> list[str]:
    """Return the strings in the support modules, with ``{}`` for each value in an f-string."""
    found = []
    for path in (ROOT / "te_graph_fixes" / "support").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_parts_are_current(page: Path) -> None:
    assert with_parts(page.read_text()) == page.read_text(), "run `python -m tools.tables`"


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist_or_have_a_commit(page: Path) -> None:
    for paragraph in re.split(r"\n\n|\n- ", page.read_text()):
        if not re.search(r"\b(?:at|commit)\s+[0-9a-f]{7}\b|repository at [0-9a-f]{10}", paragraph):
            named = re.findall(r"(?<![\w/.])(?:tests|tools|examples|te_graph_fixes)/[\w/]+\.py", paragraph)
            assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(((?!https?:)[^)#]*)(?:#([^)]*))?\)", page.read_text()):
        found = page.parent / target if target else page
        assert found.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)", found.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}, anchor


def test_the_skill_has_a_name_and_a_description() -> None:
    """Agents find a skill by these two keys, each at the start of a line."""
    page = (ROOT / "skills" / "te-graph-fixes" / "SKILL.md").read_text()
    assert re.findall(r"^(\w+):", page.split("---\n")[1], re.MULTILINE) == ["name", "description"]


def test_only_generated_parts_have_the_address() -> None:
    repository, issues = urls()["Repository"], urls()["Issues"]
    assert issues.startswith(repository)
    for page in (*COMMANDED, *PAGES):
        made = re.sub(r"<!-- address -->.*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
        assert repository not in made, page
