"""Rules for what the program says: short, one sentence, plain words, first what to do; and who says it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from te_graph_fixes.decision import verdicts
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.source import Source
from te_graph_fixes.report import FixStatus, Report, announce, problem_summary
from te_graph_fixes.settings import COMMAND
from te_graph_fixes.status import Status
from tests.support.published import VERSIONS, examined


def problems(text: str, longest: int) -> list[str]:
    """The rules that a message breaks."""
    found = []
    if not 0 < len(text) <= longest:
        found.append(f"{len(text)} characters, of {longest}")
    if re.search(r"[.;] [A-Za-z]|\.$|\n", text):
        found.append("not one sentence without a full stop")
    return [f"{text!r}: {each}" for each in found]


def test_a_record() -> None:
    broken = []
    for fix in CATALOGUE.values():
        broken += (
            problems(fix.summary, 120) + problems(fix.symptom, 110) + problems(fix.affects.replace("; ", ", "), 120)
        )
    assert broken == []
    assert problems("a graph reads old weights; it is captured without a flag", 120)


@pytest.mark.parametrize("version", [VERSIONS[1], VERSIONS[-1]])
def test_a_reason(version: str) -> None:
    """Of every fix on the oldest TransformerEngine that is tested, and the newest."""
    _, found = examined(version)
    assert [problem for verdict in found.values() for problem in problems(verdict.reason, 140)] == []


def test_a_reason_of_what_is_not_recognized(tmp_path: Path) -> None:
    """It says what was looked for, and what was found."""
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    for path in (package.parent / "__init__.py", package / "__init__.py", package / "graph.py"):
        path.write_text("")
    reasons = {
        verdict.reason for verdict in verdicts(Source.at(tmp_path)).values() if verdict.status == Status.UNRECOGNIZED
    }
    assert reasons
    for reason in reasons:
        assert re.search(r"looked for .*, found|should have|cannot ", reason), reason


def test_a_warning_names_what_to_do_and_what_is_wrong() -> None:
    fixes = {
        "warmup-reset": FixStatus(Status.UNRECOGNIZED, "looked for a loop, found none", (), ()),
        "none-outputs": FixStatus(Status.APPLIED, "corrected: every output is taken for a tensor", (), (), 1),
    }
    first, reason, graphs = problem_summary(Report("2.12.0", fixes)).split("\n  ")
    assert first.startswith(
        "stop the job, or switch the graphs of TransformerEngine 2.12.0 off: 1 fix that it needs cannot be applied, so"
    )
    assert f"te_graph_fixes.report() has all of it; `{COMMAND} issue` prints" in first
    assert reason == "warmup-reset: looked for a loop, found none"
    assert graphs.startswith("import te_graph_fixes before graphs are captured: 1 graph of TransformerEngine 2.12.0 ca")
    right = FixStatus(Status.APPLIED, "corrected", (), ())
    assert problem_summary(Report("2.12.0", {"none-outputs": right})) == ""


def test_reasons_are_counted_and_not_fixes(capsys: pytest.CaptureFixture[str]) -> None:
    shared = FixStatus(Status.FAILED, "AttributeError: no attribute '_cuda'", (), ())
    report = Report("2.99.0", dict.fromkeys(CATALOGUE, shared))
    _, *lines = problem_summary(report).split("\n  ")
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
    report = Report("2.12.0", {"none-outputs": FixStatus(Status.APPLIED, "corrected", (), ())})
    for verbose, said in ((None, rank in ("", "0")), (False, False), (True, True)):
        monkeypatch.setattr(sys.modules[Report.__module__], "_said", set())
        announce(report, verbose)
        line = (
            f"te-graph-fixes {report.version}{', rank ' * bool(rank)}{rank}: 1 fix applied to TransformerEngine 2.12.0"
        )
        assert capsys.readouterr().err == f"{line}\n" * said
