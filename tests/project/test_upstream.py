"""Test the reports to TransformerEngine (TE): the test of each report fails without its patch and passes with it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from te_graph_fixes.fixes import CATALOGUE
from tests.support.child import ROOT, on_simulator
from tests.support.published import TE as TriedTE
from tests.support.published import VERSIONS, copy_of, source
from tools import upstream

pytestmark = pytest.mark.te

REPORTS = ROOT / "upstream"
TESTS = sorted(path.stem for path in REPORTS.glob("*.py"))
BLACKWELL_RTX = {"nvfp4-weight-preswizzle"}
SHOWN_FROM = {"stale-fp8-weights": 14}
"""The minor version of TE from which a test fails. In older versions, the reset after the warmup hides the bug."""


def run_test(fix: str, only: str, te: TriedTE) -> subprocess.CompletedProcess[str]:
    device = "blackwell-rtx" if fix in BLACKWELL_RTX else "hopper"
    pytest_options = ("-q", "-p", "no:cacheprovider", "-W", "ignore", "-c", "/dev/null", "--rootdir", str(REPORTS))
    return on_simulator(
        *("-m", "pytest", REPORTS / f"{fix}.py", *pytest_options),
        path=te.path,
        TE_GRAPH_FIXES=only,
        TE_SIMULATOR_GPU=device,
    )


def test_every_report_is_about_a_fix_and_has_a_test() -> None:
    assert sorted(path.stem for path in REPORTS.glob("*.md") if path.stem != "README") == TESTS
    assert set(TESTS) <= set(CATALOGUE)


@pytest.mark.parametrize("fix", TESTS)
def test_a_test_for_te_fails_without_the_fixes_and_passes_with_them(fix: str, tried_te: TriedTE) -> None:
    tried_te.require(fix)
    if tried_te.minor < SHOWN_FROM.get(fix, 0):
        pytest.skip(f"another bug hides it in TransformerEngine {tried_te.version}")
    without = run_test(fix, "off", tried_te)
    assert re.search(r"\d+ failed", without.stdout), without.stdout + without.stderr
    require_passed(run_test(fix, "on", tried_te))


@pytest.mark.slow
@pytest.mark.parametrize("fix", TESTS)
def test_a_test_for_te_passes_with_its_patch_only(fix: str, tried_te: TriedTE) -> None:
    tried_te.require(fix)
    require_passed(run_test(fix, fix, tried_te))


def require_passed(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


def apply_patches(checkout: Path, *patches: Path) -> None:
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(checkout.parent)}
    subprocess.run(["git", "-C", str(checkout), "apply", *map(str, patches)], env=environment, check=True)


def required_patches(report: Path) -> list[str]:
    """Return the fixes that the first line of a report names, in the order of their patches; [] if there are none."""
    found = re.match(r"\*Apply after the patches of: (.*)\.\*\n", (report / "report.md").read_text())
    return found[1].split(", ") if found else []


@pytest.mark.parametrize("fix", ["skip-flag-reset", "state-after-evaluation"])
def test_patches_apply_after_the_required_ones(fix: str, tmp_path: Path) -> None:
    checkout, folder = copy_of(source(VERSIONS[-1]), tmp_path / "te"), tmp_path / "reports"
    tests = checkout / upstream.TEST_FILE
    tests.parent.mkdir(parents=True)
    tests.write_text("from utils import reset_rng_states\n")
    upstream.main([str(checkout), str(folder), fix])
    required = required_patches(folder / fix)
    assert required
    upstream.main([str(checkout), str(folder), *required])
    for name in [*required, fix]:
        apply_patches(checkout, folder / name / "fix.patch")


def test_a_report_is_ready_to_send(tmp_path: Path) -> None:
    checkout, folder = tmp_path / "te", tmp_path / "reports"
    copy_of(source(VERSIONS[-1]), checkout)
    tests = checkout / upstream.TEST_FILE
    tests.parent.mkdir(parents=True)
    before = "import torch\nfrom utils import reset_rng_states\n\nreset_rng_states()\n"
    tests.write_text(before)
    upstream.main([str(checkout), str(folder), "calibration-recipe", "warmup-main-grads"])
    assert sorted(path.name for path in folder.iterdir()) == ["calibration-recipe", "warmup-main-grads"]
    for report in folder.iterdir():
        assert sorted(path.name for path in report.iterdir()) == ["fix.patch", "report.md", "test.patch"]
        tests.write_text(before)
        apply_patches(checkout, report / "fix.patch", report / "test.patch")
        text = tests.read_text()
        assert text.count("def test_make_graphed_callables_") == 1
        assert text.index("from transformer_engine.pytorch import") < text.index("from utils import")
    graph = (checkout / upstream.GRAPH_FILE).read_text()
    assert re.search(r"^from \._te_warmup_main_grads import", graph, re.MULTILINE)
    compile(graph, upstream.GRAPH_FILE, "exec")
    assert "te-graph-fixes" not in (folder / "warmup-main-grads" / "fix.patch").read_text()
