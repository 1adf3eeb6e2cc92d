"""Test the parts and the length of messages, and which processes print them."""

from __future__ import annotations

import multiprocessing
import platform
import warnings
from pathlib import Path

import pytest

from te_graph_fixes import activation, messages
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.messages import TEGraphFixesWarning, problem_summary
from te_graph_fixes.status import FixStatus, Report, Status
from tests.support.child import python
from tests.support.published import VERSIONS, examined


@pytest.mark.parametrize("version", [VERSIONS[1], VERSIONS[-1]])
def test_a_reason(version: str) -> None:
    """On the oldest covered and the newest TransformerEngine, the reason of each verdict must be one short line."""
    for verdict in examined(version)[1].values():
        assert 0 < len(verdict.reason) <= 140, verdict.reason
        assert "\n" not in verdict.reason, verdict.reason


def test_a_warning_names_the_problem_and_what_to_do() -> None:
    fixes = {
        "warmup-reset": FixStatus(Status.UNRECOGNIZED, "looked for a loop, found none", (), ()),
        "none-outputs": FixStatus(Status.APPLIED, "every output is taken for a tensor", (), (), 1),
    }
    assert problem_summary(Report("2.12.0", fixes)).splitlines() == [
        "1 fix that TransformerEngine 2.12.0 needs cannot be applied: its graphs may give wrong gradients.",
        "Stop the job, or turn graphs off. To run without a fix, add it to TE_GRAPH_FIXES_DISABLE; without all of "
        "them, set TE_GRAPH_FIXES_STRICT=0.",
        "To report the problem, run:",
        "  te-graph-fixes issue",
        "Reasons:",
        "  warmup-reset: looked for a loop, found none",
        "1 graph was captured before the fixes were applied and may give wrong gradients.",
        "Import te_graph_fixes before capturing graphs.",
    ]
    right = FixStatus(Status.APPLIED, "every output is taken for a tensor", (), ())
    assert problem_summary(Report("2.12.0", {"none-outputs": right})) == ""


def test_fixes_with_one_reason_are_counted() -> None:
    shared = FixStatus(Status.FAILED, "AttributeError: no attribute '_cuda'", (), ())
    report = Report("2.99.0", dict.fromkeys(CATALOGUE, shared))
    assert problem_summary(report).splitlines()[5:] == [f"  {len(CATALOGUE)} fixes: {shared.reason}"]


def test_a_warning_that_is_an_error_is_raised_each_time() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", TEGraphFixesWarning)
        for _ in range(2):
            with pytest.raises(TEGraphFixesWarning, match="no such variable"):
                activation._warn("no such variable")


APPLIED = FixStatus(Status.APPLIED, "a reason", (), ())
MISSING = FixStatus(Status.FAILED, "another reason", (), ())


@pytest.mark.parametrize(
    ("variables", "number", "is_first"),
    [
        ({}, "-", True),
        ({"RANK": "8", "LOCAL_RANK": "0"}, "8", True),
        ({"RANK": "8", "LOCAL_RANK": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}, "8", True),
        ({"RANK": "1"}, "1", False),
        ({"SLURM_PROCID": "9", "SLURM_LOCALID": "1"}, "9", False),
        ({"OMPI_COMM_WORLD_RANK": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "4", True),
        ({"PMI_RANK": "12", "MPI_LOCALRANKID": "0"}, "12", True),
        ({"PMI_RANK": "12"}, "12", False),
        ({"RANK": " ", "LOCAL_RANK": ""}, "-", True),
    ],
)
def test_the_ranks_that_print_the_line(
    variables: dict[str, str],
    number: str,
    is_first: bool,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By default, the first rank of each host and every rank that lacks a fix print the line."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for fix, missing in (APPLIED, 0), (MISSING, 1):
        mode = "failed" if missing else "memory"
        report = Report("2.12.0", {"none-outputs": fix}, "0.1.0", mode=mode, digest="1a2b3c4d")
        for verbose, is_printed in ((None, is_first), (False, False), (True, True)):
            monkeypatch.setattr(messages, "_printed", set())
            for _ in range(2):
                messages.print_status_line(report, verbose)
            line = (
                f"te-graph-fixes: host={platform.node()} rank={number} te=2.12.0 package=0.1.0 mode={mode} "
                f"applied={1 - missing} missing={missing} digest=1a2b3c4d\n"
            )
            assert capfd.readouterr().err == line * (is_printed or bool(missing))


def test_a_daemon_does_not_repeat_the_line(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_printed", set())
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    messages.print_status_line(Report("2.12.0", {"none-outputs": APPLIED}), verbose=True)
    assert not capfd.readouterr().err
    messages.print_status_line(Report("2.12.0", {"none-outputs": MISSING}), verbose=False)
    assert " missing=1 " in capfd.readouterr().err


PRINT = """
import os, sys
from te_graph_fixes import Report, messages

{0}
messages.print_status_line(Report("2 12", {{}}), verbose=True)
"""


@pytest.mark.parametrize(
    "state",
    [
        "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)",
        "read, write = os.pipe(); os.close(read); os.dup2(write, 2)",
        "os.close(2)",
        "sys.stderr.close()",
        "os.environ['RANK'] = '\\udcff'",
    ],
)
def test_the_line_never_raises(state: str) -> None:
    done = python("-W", "error", "-c", PRINT.format(state))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    if "RANK" in state:
        assert " rank=\\udcff te=212 " in done.stderr


def test_a_warning_without_standard_error() -> None:
    code = "import sys; from te_graph_fixes.activation import _warn; sys.stderr.close(); _warn('text')"
    assert python("-c", code).returncode == 0


FORK = """
import os, signal, threading
import te_graph_fixes
from te_graph_fixes.activation import _activation

held, release = threading.Event(), threading.Event()
def hold():
    with _activation._lock:
        held.set()
        release.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
if os.fork() == 0:
    signal.alarm(20)
    os._exit(len(te_graph_fixes.report().fixes) == 0)
status = os.wait()[1]
release.set()
thread.join()
print(status)
"""


def test_a_fork_while_another_thread_applies_the_fixes() -> None:
    assert python("-c", FORK).stdout == "0\n"


IMPORTS = """
import sys
from te_graph_fixes.activation import _activation

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("te_graph_fixes"):
            print(name.partition(".")[2], _activation._lock._is_owned())

sys.meta_path.insert(0, Finder())
import transformer_engine.pytorch
"""


def test_no_module_is_imported_under_the_lock(tmp_path: Path) -> None:
    """A process that was forked during an import would wait forever if it imported the same module."""
    for name in ("transformer_engine", "transformer_engine/pytorch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    lines = python("-W", "ignore", "-c", IMPORTS, path=tmp_path).stdout.splitlines()
    assert "decision False" in lines
    assert not [line for line in lines if line.endswith("True")]
