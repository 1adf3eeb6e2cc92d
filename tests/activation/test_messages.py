"""Messages: their parts, their length, and the processes that print them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from te_graph_fixes.decision import verdicts
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.source import Source
from te_graph_fixes.report import FixStatus, Report, announce, problem_summary
from te_graph_fixes.status import Status
from tests.support.published import VERSIONS, examined


def test_a_record() -> None:
    """One line each, so that ``status`` and ``list`` are readable: no line break, and a limited length."""
    for fix in CATALOGUE.values():
        for text, longest in ((fix.summary, 120), (fix.symptom, 110), (fix.affects, 120)):
            assert 0 < len(text) <= longest, text
            assert "\n" not in text, text


@pytest.mark.parametrize("version", [VERSIONS[1], VERSIONS[-1]])
def test_a_reason(version: str) -> None:
    """The reasons on the oldest TransformerEngine that is tested, and on the newest."""
    for verdict in examined(version)[1].values():
        assert 0 < len(verdict.reason) <= 140, verdict.reason
        assert "\n" not in verdict.reason, verdict.reason


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


def test_a_warning_names_the_problem_and_what_to_do() -> None:
    fixes = {
        "warmup-reset": FixStatus(Status.UNRECOGNIZED, "looked for a loop, found none", (), ()),
        "none-outputs": FixStatus(Status.APPLIED, "every output is taken for a tensor", (), (), 1),
    }
    assert problem_summary(Report("2.12.0", fixes)).splitlines() == [
        "1 fix that TransformerEngine 2.12.0 needs cannot be applied: its graphs may give wrong gradients.",
        "Stop the job, or turn graphs off. To run without a fix, add it to TE_GRAPH_FIXES_DISABLE; without all of "
        "them, set TE_GRAPH_FIXES_STRICT=0.",
        "For a report of the problem, run:",
        "  te-graph-fixes issue",
        "Reasons:",
        "  warmup-reset: looked for a loop, found none",
        "1 graph was captured before the fixes were applied and may give wrong gradients.",
        "Import te_graph_fixes before capturing graphs.",
    ]
    right = FixStatus(Status.APPLIED, "every output is taken for a tensor", (), ())
    assert problem_summary(Report("2.12.0", {"none-outputs": right})) == ""


def test_fixes_with_one_reason_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    shared = FixStatus(Status.FAILED, "AttributeError: no attribute '_cuda'", (), ())
    report = Report("2.99.0", dict.fromkeys(CATALOGUE, shared))
    assert problem_summary(report).splitlines()[5:] == [f"  {len(CATALOGUE)} fixes: {shared.reason}"]
    announce(report, verbose=None)
    printed = capsys.readouterr().err
    assert printed.endswith(
        f": no fix applied to TransformerEngine 2.99.0; cannot be applied: {len(CATALOGUE)} fixes\n"
    )


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
    report = Report("2.12.0", {"none-outputs": FixStatus(Status.APPLIED, "a reason", (), ())})
    for verbose, said in ((None, rank in ("", "0")), (False, False), (True, True)):
        monkeypatch.setattr(sys.modules[Report.__module__], "_printed", set())
        announce(report, verbose)
        line = (
            f"te-graph-fixes {report.version}{', rank ' * bool(rank)}{rank}: 1 fix applied to TransformerEngine 2.12.0"
        )
        assert capsys.readouterr().err == f"{line}\n" * said
