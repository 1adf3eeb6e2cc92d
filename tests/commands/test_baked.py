"""Test, on the simulator, the numbers, the report and the errors of a baked TransformerEngine (TE)."""

from __future__ import annotations

import json
import os
import re
from itertools import pairwise
from pathlib import Path

import pytest

from te_graph_fixes import __version__
from te_graph_fixes.commands.bake import ORIGINAL, baked_files
from te_graph_fixes.commands.cli import main
from te_graph_fixes.decision import decide, read
from te_graph_fixes.manifest import NAME
from te_graph_fixes.patching.source import Source
from te_graph_fixes.settings import Settings
from tests.fixes.test_core_fixes import CASES
from tests.support.child import on_simulator, python, simulate
from tests.support.published import COVERED, copy_of, source

pytestmark = pytest.mark.te


@pytest.fixture(scope="module", params=["installed", *(pytest.param(each, marks=pytest.mark.slow) for each in COVERED)])
def baked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = Path(Source.installed().location).parent if request.param == "installed" else source(request.param)
    tree = copy_of(root, tmp_path_factory.mktemp("baked"))
    assert main(["bake", "--source", str(tree)]) == 0
    return tree


NONSENSE = {f"TE_GRAPH_FIXES_{name}": "nonsense" for name in ("DISABLE", "STRICT", "CHECK", "VERBOSE", "OTHER")}


@pytest.mark.parametrize("variables", [{"TE_GRAPH_FIXES": "off", **NONSENSE}, {}], ids=["off", "on"])
def test_a_baked_te_is_right_with_and_without_the_package(baked: Path, variables: dict[str, str]) -> None:
    """Cases must be bit-identical to eager runs. With fixes off, an invalid value of another variable is no error."""
    done = on_simulator("-m", "tests.verify.child", *CASES, path=baked, imported=(), **variables)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["case"]: (line["outcome"], line.get("error"), line["applied"]) for line in found} == {
        case: ("measured", 0.0, []) for case in CASES
    }
    undo = ' undo="te-graph-fixes bake --undo"' if variables else ""
    assert re.search(rf" mode=baked applied=\d+ missing=0 digest=\w{{8}}{undo}\n", done.stderr)


TOUR = """
import te_graph_fixes

def on_disk():
    return {fix for fix, status in te_graph_fixes.report().fixes.items() if status.reason.startswith("baked by")}

assert te_graph_fixes.report().having("pending").keys() == on_disk() != set()
import transformer_engine.pytorch
import transformer_engine.pytorch.graph as graph
assert graph.make_graphed_callables.__code__.co_filename == graph.__file__
baked = on_disk()
te_graph_fixes.deactivate()
assert on_disk() == baked
te_graph_fixes.activate(disable=[min(baked)], strict=True)
"""
UNDO = "The settings have no effect on baked fixes until `te-graph-fixes bake --undo`"


@pytest.mark.parametrize("setting", ["on", "off"])
def test_the_switches_and_the_report_tell_what_is_on_disk(baked: Path, setting: str) -> None:
    done = on_simulator("-c", TOUR, path=baked, imported=(), TE_GRAPH_FIXES=setting)
    assert (done.returncode, f"FixNotAppliedError: {UNDO}: " in done.stderr) == (
        (1, True) if setting == "on" else (0, False)
    )
    assert re.findall(r"TEGraphFixesWarning: (.*) baked .* stay active until `", done.stderr) == [
        f"The fixes that te-graph-fixes {__version__}"
    ]
    assert "disabled" not in done.stderr


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("interrupted", "a bake or its undo was interrupted or is running, or .* run `te-graph-fixes bake` or"),
        ("version", "te-graph-fixes 0.0.9 baked .*, but this is te-graph-fixes .*\n  te-graph-fixes bake\n"),
        ("settings", UNDO),
    ],
)
def test_strict_mode_refuses_a_bake(state: str, said: str, tmp_path: Path) -> None:
    tree = copy_of(Path(Source.installed().location).parent, tmp_path)
    graph, manifest = tree / "transformer_engine/pytorch/graph.py", tree / "transformer_engine" / NAME
    variables = {"TE_GRAPH_FIXES_DISABLE": "replay-arguments"} if state == "settings" else {}
    assert main(["bake", "--source", str(tree)]) == 0
    if state == "interrupted":
        os.replace(f"{graph}{ORIGINAL}", graph)
    elif state == "version":
        manifest.write_text(manifest.read_text().replace(__version__, "0.0.9"))
    program = "import te_graph_fixes, transformer_engine.pytorch; print(te_graph_fixes.report())"
    for strict in ("1", "0"):
        variables["TE_GRAPH_FIXES_STRICT"] = strict
        done = on_simulator("-c", program, path=tree, imported=(), **variables)
        assert (done.returncode, len(re.findall(said, done.stderr))) == (int(strict), 1), done.stderr
    assert ("unrecognized" in done.stdout) == (" mode=failed " in done.stderr) == (state == "interrupted")
    assert on_simulator("-c", program, path=tree, imported=(), TE_GRAPH_FIXES="off").returncode == 0


LIVE = """
import gc, subprocess, sys, time
{0}
import transformer_engine.pytorch
import transformer_engine.pytorch.graph as graph
gc.collect()
gc.disable()
{1}
begin = time.process_time()
import te_graph_fixes
used = time.process_time() - begin
report = te_graph_fixes.report()
print(used, report.mode, len(report.active), len(report.missing), report.digest)
"""
BAKE = 'subprocess.run([sys.executable, "-m", "te_graph_fixes", "bake", "--source", {0!r}], check=True, stdout=2)'
REPLACED = "graph.make_graphed_callables.__code__ = (lambda *args: None).__code__"


def test_what_runs_is_compared_with_the_files(tmp_path: Path) -> None:
    """The report describes the running code, even if TE was baked after its import or a function was replaced."""
    tree, prefix = copy_of(Path(Source.installed().location).parent, tmp_path / "te"), str(tmp_path / "prefix")
    graph, mode = tree / "transformer_engine/pytorch/graph.py", "py_compile.PycInvalidationMode.UNCHECKED_HASH"
    program = f"import py_compile; py_compile.compile({str(graph)!r}, invalidation_mode={mode})"
    assert python("-c", program, PYTHONPYCACHEPREFIX=prefix).returncode == 0

    def live(before: str = "", after: str = "", path: str | Path = tree) -> list[str]:
        done = on_simulator("-c", LIVE.format(before, after), path=path, imported=(), PYTHONHASHSEED=str(len(after)))
        assert done.returncode == 0, done.stderr
        assert re.findall(r" mode=(\w+) applied=(\d+) missing=(\d+) ", done.stderr)[0] == (*done.stdout.split()[1:4],)
        return done.stdout.split()

    _, *later, _ = live(after=BAKE.format(str(tree)))
    used, mode, active, missing, digest = live()
    assert float(used) < 0.3  # 0.06 s on an idle computer
    assert (mode, missing, later) == ("baked", "0", ["failed", "0", active])
    assert live(path="")[1:] == ["memory", active, "0", digest]
    for before, after in (("", REPLACED), (f"sys.pycache_prefix = {prefix!r}", "")):
        _, mode, fewer, missing, other = live(before, after)
        assert (mode, int(fewer) + int(missing), other != digest) == ("baked", int(active), True)
        assert int(missing) > 0


def test_a_check_on_it_finds_nothing(baked: Path) -> None:
    lines = simulate("tests/support/check_training.py", CASES[0], CASES[1], path=baked).splitlines()
    assert [(found["same"], found["found"]) for found in map(json.loads, lines)] == [(True, [])] * 2


EAGER = "-m", "tests.support.eager_training", "[]", "1/13"  # a program for each recipe


@pytest.mark.parametrize("version", ["installed", *(pytest.param(each, marks=pytest.mark.slow) for each in COVERED)])
def test_after_each_rename_of_a_bake_eager_training_is_as_before(version: str, tmp_path: Path) -> None:
    root = Path(Source.installed().location).parent if version == "installed" else source(version)
    files = baked_files(decide(read(Source.at(copy_of(root, tmp_path))), Settings()))
    results = {"": simulate(*EAGER, path=tmp_path, imported=(), TE_GRAPH_FIXES="off")}
    for (path, (_, text)), (following, _) in pairwise([*files.items(), ("", ("", ""))]):
        (tmp_path / path).write_text(text)
        if not following.startswith("transformer_engine/pytorch/_te_"):  # no code imports the new modules yet
            results[path] = simulate(*EAGER, path=tmp_path, imported=(), TE_GRAPH_FIXES="off")
    assert set(results.values()) == {results[""]}, results
    assert list(results)[-1] == "transformer_engine/pytorch/graph.py"
