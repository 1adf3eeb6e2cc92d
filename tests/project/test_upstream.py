"""Test the reports to TransformerEngine (TE): the test of each report must fail without the fix and pass with it."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from te_graph_fixes.fixes import CATALOGUE
from tests.support.child import ROOT, on_simulator
from tests.support.published import TE as TriedTE
from tests.support.published import VERSIONS, copy_of, examined, source
from tools import upstream

pytestmark = pytest.mark.te

REPORTS = ROOT / "upstream"
TESTS = sorted(path.stem for path in REPORTS.glob("*.py"))
BLACKWELL_RTX = {"nvfp4-weight-preswizzle"}
SHOWN_FROM = {"stale-fp8-weights": 14}
"""The first minor version of TE in which a fix's test fails. In older versions, another bug hides this bug."""


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


def test_a_fix_without_a_report_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no report about nosuchfix"):
        upstream.main([str(source(VERSIONS[-1])), str(tmp_path), "nosuchfix"])


@pytest.mark.parametrize("fix", TESTS)
def test_a_test_for_te_fails_without_the_fixes_and_passes_with_them(fix: str, tried_te: TriedTE) -> None:
    tried_te.require(fix)
    if tried_te.minor < SHOWN_FROM.get(fix, 0):
        pytest.skip(f"another bug hides this bug in TransformerEngine {tried_te.version}")
    without = run_test(fix, "off", tried_te)
    assert re.search(r"\d+ failed", without.stdout), without.stdout + without.stderr
    require_passed(run_test(fix, "on", tried_te))


@pytest.mark.slow
@pytest.mark.parametrize("fix", TESTS)
def test_a_test_for_te_passes_with_its_patch(fix: str, tried_te: TriedTE, tmp_path: Path) -> None:
    tried_te.require(fix)
    root = Path(tried_te.path or Path(examined("installed")[0].location).parent)
    checkout = checkout_with_patch(fix, root, tmp_path)
    require_passed(run_test(fix, "off", replace(tried_te, path=str(checkout))))


@pytest.mark.parametrize("fix", ["grad-added-mark", "backward-amax-reduction", "state-after-evaluation"])
def test_a_patch_contains_only_used_parts_of_the_spine(fix: str, tmp_path: Path) -> None:
    checkout = checkout_with_patch(fix, source(VERSIONS[-1]), tmp_path)
    spine = (checkout / upstream.GRAPH_FILE).with_name("_te_replay.py").read_text()
    text = "".join(path.read_text() for path in (checkout / "transformer_engine").rglob("*.py"))
    phases = set(re.findall(r'_(?:steps\[|replay\()"(\w+ \w+)"', spine))
    assert phases == set(re.findall(r'\.add\(\s*"(\w+ \w+)", ', text))
    assert set(re.findall(r"^    def ([a-z]\w+)", spine, re.MULTILINE)) <= set(re.findall(r"\.(\w+)\(", text))


def checkout_with_patch(fix: str, root: Path, folder: Path) -> Path:
    """Copy a TE, apply one fix and the fixes that it requires to the copy, and return the folder of the copy."""
    checkout = checkout_of(root, folder / "te")
    upstream.main([str(checkout), str(folder), fix])
    patches = [folder / fix / name for name in ("required.patch", "fix.patch")]
    apply_patches(checkout, *(patch for patch in patches if patch.exists()))
    return checkout


def checkout_of(root: Path, folder: Path) -> Path:
    """Copy a TE to ``folder``, add a file of tests, and return the folder."""
    tests = copy_of(root, folder) / upstream.TEST_FILE
    tests.parent.mkdir(parents=True)
    tests.write_text("import torch\nfrom utils import reset_rng_states\n\nreset_rng_states()\n")
    return folder


def require_passed(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


def apply_patches(checkout: Path, *patches: Path) -> None:
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(checkout.parent)}
    subprocess.run(["git", "-C", str(checkout), "apply", *map(str, patches)], env=environment, check=True)


def test_a_report_is_ready_to_send(tmp_path: Path) -> None:
    checkout, folder = checkout_of(source(VERSIONS[-1]), tmp_path / "te"), tmp_path / "reports"
    tests = checkout / upstream.TEST_FILE
    before = tests.read_text()
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
