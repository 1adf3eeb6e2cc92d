"""Rules for what the program says: short, one sentence, plain words, and in an error what to do."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import te_graph_fixes
from te_graph_fixes.checking import Options
from te_graph_fixes.decision import verdicts
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.messages import PLACEHOLDER, announce, how_to_report, problem_summary
from te_graph_fixes.patching.source import Source
from te_graph_fixes.report import FixStatus, Report
from te_graph_fixes.settings import COMMAND, Settings
from te_graph_fixes.state import State
from tests.support.child import ROOT
from tests.support.published import VERSIONS, examined

STIFF = re.compile(r"leads? (one|you) to expect|the source decides|from now on|what is graphed|somebody", re.IGNORECASE)
ADVICE = re.compile(r"valid: |must be |write |leave it out|unset |call |import |install |see |did you mean")
PACKAGE = ROOT / "te_graph_fixes"
EVERY = pytest.mark.parametrize("fix_id", CATALOGUE)


def problems(text: str, longest: int) -> list[str]:
    """The rules that a message breaks."""
    found = []
    if not 0 < len(text) <= longest:
        found.append(f"{len(text)} characters, of {longest}")
    if re.search(r"[.;] [A-Za-z]|\.$|\n", text):
        found.append("not one sentence without a full stop")
    if STIFF.search(text):
        found.append("stiff")
    return [f"{text!r}: {each}" for each in found]


@pytest.mark.parametrize(
    "text",
    [
        "x" * 200,
        "a graph reads old weights; it is captured without a flag",
        "a graph reads old weights.",
        "version 2.14 leads one to expect not-needed",
    ],
)
def test_the_rules_can_be_broken(text: str) -> None:
    assert problems(text, 120)
    assert not problems("a graph reads the weights of its capture", 120)


@EVERY
def test_a_record(fix_id: str) -> None:
    fix = CATALOGUE[fix_id]
    assert problems(fix.summary, 120) + problems(fix.symptom, 110) + problems(fix.users.replace("; ", ", "), 112) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_a_reason(version: str) -> None:
    """Of every fix on every published TransformerEngine."""
    _, found = examined(version)
    assert [problem for verdict in found.values() for problem in problems(verdict.reason, 140)] == []


def test_a_reason_of_what_is_not_recognized(tmp_path: Path) -> None:
    """It says what was looked for, and what was found."""
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    for path in (package.parent / "__init__.py", package / "__init__.py", package / "graph.py"):
        path.write_text("")
    reasons = {
        verdict.reason for verdict in verdicts(Source.at(tmp_path)).values() if verdict.state == State.UNRECOGNIZED
    }
    assert reasons
    for reason in reasons:
        assert not STIFF.search(reason)
        assert re.search(r"looked for .*, found|should have|cannot ", reason), reason


BAD_SETTINGS: dict[str, Callable[[], object]] = {
    "no-such-fix": lambda: te_graph_fixes.activate(only=["no-such-fix"]),
    "warmup-rest": lambda: te_graph_fixes.activate(disable=["warmup-rest"]),
    "warmup-reset requires": lambda: te_graph_fixes.activate(only=["warmup-reset"]),
    "perhaps": lambda: Settings.read(environ={"TE_GRAPH_FIXES_STRICT": "perhaps"}),
    "loud": lambda: Settings.read(environ={"TE_GRAPH_FIXES_VERBOSE": "loud"}),
    "','": lambda: Settings.read(environ={"TE_GRAPH_FIXES": ","}),
    "two": lambda: Options.parse("two"),
    "-1": lambda: Options(layers=-1),
}


@pytest.mark.parametrize("given", BAD_SETTINGS)
def test_an_error_says_what_was_given_and_what_to_do(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(examined("2.12.0")[0].location).removesuffix("transformer_engine"))
    with pytest.raises(ValueError, match=given) as raised:
        BAD_SETTINGS[given]()
    text = str(raised.value)
    assert ADVICE.search(text), text
    assert len(text) <= 300 or text.count(",") >= len(CATALOGUE) - 1, text  # all ids


def test_a_warning_names_what_to_do_and_what_is_wrong() -> None:
    fixes = {
        "warmup-reset": FixStatus(State.UNRECOGNIZED, "looked for a loop, found none", (), ()),
        "none-outputs": FixStatus(State.APPLIED, "corrected: every output is taken for a tensor", (), (), 1),
    }
    first, reason, graphs = problem_summary(Report("2.12.0", fixes), strict=False).split("\n  ")
    assert first.startswith(
        "TransformerEngine 2.12.0: 1 fix that it needs cannot be applied, so its graphs may give wr"
    )
    assert (
        f"Stop the job or switch graphs off; te_graph_fixes.report() has all of it; `{COMMAND} issue` prints" in first
    )
    assert reason == "warmup-reset: looked for a loop, found none"
    assert "1 graph captured before the fixes were in place" in graphs
    assert graphs.endswith("import te_graph_fixes before graphs are captured")
    assert not STIFF.search(first + graphs)
    right = FixStatus(State.APPLIED, "corrected", (), ())
    assert problem_summary(Report("2.12.0", {"none-outputs": right}), strict=True) == ""


def test_reasons_are_counted_and_not_fixes(capsys: pytest.CaptureFixture[str]) -> None:
    shared = FixStatus(State.FAILED, "AttributeError: no attribute '_cuda'", (), ())
    report = Report("2.99.0", dict.fromkeys(CATALOGUE, shared))
    _, *lines = problem_summary(report, strict=True).split("\n  ")
    assert lines == [f"{len(CATALOGUE)} fixes: {shared.reason}"]
    announce(report, verbose=None)
    said = capsys.readouterr().err
    assert said.endswith(f": no fix applied to TransformerEngine 2.99.0; missing: {len(CATALOGUE)} fixes\n")


@pytest.mark.parametrize(
    "variables", [{}, {"RANK": "0"}, {"RANK": "1"}, {"OMPI_COMM_WORLD_RANK": "0"}, {"PMI_RANK": "12"}]
)
def test_the_first_rank_alone_says_what_was_applied(
    variables: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is asked to be silent, or all are asked to speak."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (rank,) = variables.values() or [""]
    report = Report("2.12.0", {"none-outputs": FixStatus(State.APPLIED, "corrected", (), ())})
    for verbose, said in ((None, rank in ("", "0")), (False, False), (True, True)):
        monkeypatch.setattr("te_graph_fixes.messages._said", set())
        announce(report, verbose)
        line = (
            f"te-graph-fixes {report.version}{', rank ' * bool(rank)}{rank}: 1 fix applied to TransformerEngine 2.12.0"
        )
        more = " (applied: none-outputs)" * bool(verbose)
        assert capsys.readouterr().err == f"{line}{more}\n" * said


def test_a_report_goes_where_the_metadata_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert how_to_report() == f"`{COMMAND} issue` prints what whoever gave you the package needs to know"
    (tmp_path / "te_graph_fixes-9.dist-info").mkdir()
    metadata = tmp_path / "te_graph_fixes-9.dist-info" / "METADATA"
    metadata.write_text(f"Name: te-graph-fixes\nVersion: 9\nProject-URL: Issues, {PLACEHOLDER}issues\n")
    assert "example.invalid" not in how_to_report()
    metadata.write_text("Name: te-graph-fixes\nVersion: 9\nProject-URL: Issues, https://x.invalid/new\n")
    assert how_to_report() == f"`{COMMAND} issue` prints what a report at https://x.invalid/new needs"


def texts() -> Iterator[tuple[str, str]]:
    """Every text constant of the package that is no docstring, with the file that has it."""
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield str(path.relative_to(ROOT)), node.value


def test_no_text_of_the_program_is_stiff() -> None:
    assert [(path, text) for path, text in texts() if STIFF.search(text)] == []
