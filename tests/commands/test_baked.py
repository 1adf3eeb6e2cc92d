"""Test that graphs of a baked TransformerEngine (TE) are bit-identical to eager runs, on the simulator."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from te_graph_fixes.commands.bake import baked_files
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


@pytest.mark.parametrize("setting", ["off", "on"])
def test_a_baked_te_is_right_with_and_without_the_package(baked: Path, setting: str) -> None:
    done = on_simulator("-m", "tests.verify.child", *CASES, path=baked, imported=(), TE_GRAPH_FIXES=setting)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["case"]: (line["outcome"], line.get("error"), line["applied"]) for line in found} == {
        case: ("measured", 0.0, []) for case in CASES
    }
    undo = ' undo="te-graph-fixes bake --undo"' if setting == "off" else ""
    assert re.search(rf" mode=baked applied=\d+ missing=0 digest=\w{{8}}{undo}\n", done.stderr)


TOUR = """
import sys, warnings
warnings.simplefilter("always")
said = []

def note(message, category, *_):
    if category.__name__ == "TEGraphFixesWarning":
        said.append(str(message))

warnings.showwarning = note
import te_graph_fixes

def on_disk():
    return {fix for fix, status in te_graph_fixes.report().fixes.items() if status.reason.startswith("baked by")}

assert te_graph_fixes.report().having("pending").keys() == on_disk() != set()
import transformer_engine.pytorch
import transformer_engine.pytorch.graph as graph
assert graph.make_graphed_callables.__code__.co_filename == graph.__file__
made = on_disk()
assert {status.status for status in te_graph_fixes.report().fixes.values()} <= {"not-needed", "not-applicable"}
print(*said, sep="\\n")
said.clear()
te_graph_fixes.deactivate()
assert on_disk() == made
print("after:", *said)
try:
    te_graph_fixes.activate(disable=[min(made)], strict=True)
except te_graph_fixes.FixNotAppliedError as error:
    print("strict:", error)
assert on_disk() == made
"""
UNDO = "The settings have no effect on baked fixes until `te-graph-fixes bake --undo`"


@pytest.mark.parametrize(
    ("variables", "warned"),
    [
        ({}, ""),
        ({"TE_GRAPH_FIXES": "off"}, ""),
        (
            {"TE_GRAPH_FIXES_DISABLE": "replay-arguments"},
            rf"{UNDO}: replay-arguments stay applied\.",
        ),
    ],
)
def test_the_switches_and_the_report_tell_what_is_on_disk(baked: Path, variables: dict[str, str], warned: str) -> None:
    done = on_simulator("-c", TOUR, path=baked, imported=(), **variables)
    assert done.returncode == 0, done.stderr
    first, after, *strict = done.stdout.splitlines()
    assert re.fullmatch(warned, first)
    assert re.fullmatch(
        r"after: The fixes that te-graph-fixes \S+ baked into TransformerEngine stay active until `te-graph-fixes .*",
        after,
    )
    is_off = "TE_GRAPH_FIXES" in variables
    assert is_off if not strict else re.match(f"strict: {UNDO}: ", strict[0])
    assert "disabled" not in done.stderr


def test_strict_mode_refuses_other_settings(baked: Path) -> None:
    program = "import te_graph_fixes, transformer_engine.pytorch"
    done = on_simulator(
        "-c", program, path=baked, imported=(), TE_GRAPH_FIXES_DISABLE="replay-arguments", TE_GRAPH_FIXES_STRICT="1"
    )
    assert (done.returncode, len(re.findall(f"FixNotAppliedError: {UNDO}", done.stderr))) == (1, 1)


@pytest.mark.parametrize("state", ["interrupted", "by another version"])
def test_strict_mode_refuses_a_bake_that_is_not_whole_or_of_another_version(state: str, tmp_path: Path) -> None:
    tree = copy_of(Path(Source.installed().location).parent, tmp_path)
    graph, manifest = tree / "transformer_engine/pytorch/graph.py", tree / "transformer_engine/te-graph-fixes.json"
    original = graph.read_text()
    assert main(["bake", "--source", str(tree)]) == 0
    if state == "interrupted":
        graph.write_text(original)
        said = "a bake or its undo was interrupted or is running, or .* run `te-graph-fixes bake` or"
    else:
        data = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({**data, "version": "0.0.9"}))
        said = (
            "te-graph-fixes 0.0.9 baked this TransformerEngine, but this is te-graph-fixes .*\n  te-graph-fixes bake\n"
        )
    program = "import te_graph_fixes, transformer_engine.pytorch; print(te_graph_fixes.report())"
    done = on_simulator("-c", program, path=tree, imported=(), TE_GRAPH_FIXES_STRICT="1")
    assert (done.returncode, len(re.findall(said, done.stderr))) == (1, 1), done.stderr
    done = on_simulator("-c", program, path=tree, imported=())
    assert (done.returncode, len(re.findall(said, done.stderr))) == (0, 1), done.stderr
    assert ("unrecognized" in done.stdout) == (state == "interrupted")
    assert on_simulator("-c", program, path=tree, imported=(), TE_GRAPH_FIXES="off").returncode == 0


def test_off_never_raises(baked: Path) -> None:
    nonsense = dict.fromkeys(("DISABLE", "STRICT", "CHECK", "VERBOSE", "OTHER"), "nonsense")
    program = (
        "import warnings\nwarnings.filterwarnings('error', 'Ign')\nimport te_graph_fixes, transformer_engine.pytorch"
    )
    done = on_simulator(
        *("-c", program),
        path=baked,
        imported=(),
        TE_GRAPH_FIXES="off",
        **{f"TE_GRAPH_FIXES_{name}": value for name, value in nonsense.items()},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count('undo="te-graph-fixes bake --undo"') == 1


CPU = """
import gc, sys, time
import transformer_engine.pytorch
import transformer_engine.pytorch.graph as graph
gc.collect()
gc.disable()
{0}
begin = time.process_time()
import te_graph_fixes
used = time.process_time() - begin
report = te_graph_fixes.report()
print(used, report.mode, len(report.active), len(report.missing), report.digest)
"""


def test_what_runs_is_compared_with_the_files(baked: Path) -> None:
    used, mode, active, missing, digest = simulate("-c", CPU.format(""), path=baked, imported=()).split()
    assert (mode, missing) == ("baked", "0")
    assert float(used) < 0.3  # 0.06 on an idle computer
    replaced = "graph.make_graphed_callables.__code__ = (lambda *args: None).__code__"
    _, mode, fewer, missing, other = simulate("-c", CPU.format(replaced), path=baked, imported=()).split()
    assert (mode, int(fewer) + int(missing)) == ("baked", int(active))
    assert int(missing) > 0
    assert digest != other


BAKED_LATER = """
import os, subprocess, sys
import transformer_engine.pytorch
done = subprocess.run([sys.executable, "-m", "te_graph_fixes", "bake", "--source", sys.argv[1]], stdout=2)
import te_graph_fixes
report = te_graph_fixes.report()
print(report.mode, len(report.active), len(report.missing) > 20, *list(report.missing.values())[:1])
"""


def test_a_te_that_was_imported_before_the_bake(tmp_path: Path) -> None:
    tree = copy_of(Path(Source.installed().location).parent, tmp_path)
    (tmp_path / "job.py").write_text(BAKED_LATER)
    done = on_simulator(str(tmp_path / "job.py"), str(tree), path=tree, imported=())
    assert re.match(r"failed 0 True te-graph-fixes \S+ baked it .* but this process runs other code", done.stdout)
    assert " mode=failed applied=0 missing=" in done.stderr
    done = on_simulator(str(tmp_path / "job.py"), str(tree), path=tree, imported=(), TE_GRAPH_FIXES_STRICT="1")
    assert done.stdout.startswith("baked ")  # now the files were baked before the import


def test_stale_bytecode(tmp_path: Path) -> None:
    """Python does not compare this bytecode, in another folder, with the file."""
    tree, prefix = copy_of(Path(Source.installed().location).parent, tmp_path / "te"), tmp_path / "prefix"
    graph = tree / "transformer_engine" / "pytorch" / "graph.py"
    mode = "py_compile.PycInvalidationMode.UNCHECKED_HASH"
    program = f"import py_compile; py_compile.compile({str(graph)!r}, invalidation_mode={mode})"
    assert python("-c", program, PYTHONPYCACHEPREFIX=str(prefix)).returncode == 0
    assert main(["bake", "--source", str(tree)]) == 0
    program = "import te_graph_fixes, transformer_engine.pytorch"
    (tmp_path / "job.py").write_text(program)
    found = python("-m", "tests.simulator", tmp_path / "job.py", path=tree, PYTHONPYCACHEPREFIX=str(prefix))
    assert re.search(r" mode=baked applied=\d missing=\d\d ", found.stderr)


def test_the_digest_is_that_of_the_fixes_in_memory(baked: Path, tmp_path: Path) -> None:
    program = "import te_graph_fixes, transformer_engine.pytorch; print(te_graph_fixes.report().digest)"
    tree = copy_of(baked, tmp_path / "elsewhere")
    (tree / "transformer_engine" / NAME).write_bytes((baked / "transformer_engine" / NAME).read_bytes())
    digests = {simulate("-c", program, path=path, imported=(), PYTHONHASHSEED="7") for path in (baked, tree)}
    assert main(["bake", "--undo", "--source", str(baked)]) == 0
    digests.add(simulate("-c", program, path=baked, imported=()))
    assert main(["bake", "--source", str(baked)]) == 0
    assert len(digests) == 1


def test_a_check_on_it_finds_nothing(baked: Path) -> None:
    lines = simulate("tests/support/check_training.py", CASES[0], CASES[1], path=baked).splitlines()
    assert [(found["same"], found["found"]) for found in map(json.loads, lines)] == [(True, [])] * 2


EAGER = """
import hashlib, torch, transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

torch.manual_seed(0)
layers = [te.LayerNormLinear(32, 32), te.LayerNormMLP(32, 64), te.Linear(32, 32), te.GroupedLinear(2, 32, 32)]
model = torch.nn.ModuleList([*layers, te.ops.Sequential(te.ops.Linear(32, 32))]).cuda()
optimizer, digest = torch.optim.SGD(model.parameters(), 0.1), hashlib.sha256()
for recipe in (None, DelayedScaling(), Float8CurrentScaling()):
    for number in range(4):
        out = x = torch.randn(32, 32, device="cuda", requires_grad=True)
        with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            for layer in layers:
                splits = [[16, 16]] if layer is layers[3] else []
                out = layer(out, *splits, is_first_microbatch=number % 2 == 0)
            out = model[4](out)
        out.square().mean().backward()
        digest.update(out.detach().cpu().numpy().tobytes() + x.grad.cpu().numpy().tobytes())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
digest.update(b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters()))
print(digest.hexdigest())
"""


@pytest.mark.parametrize("version", ["installed", *(pytest.param(each, marks=pytest.mark.slow) for each in COVERED)])
def test_after_each_rename_of_a_bake_eager_training_is_as_before(version: str, tmp_path: Path) -> None:
    root = Path(Source.installed().location).parent if version == "installed" else source(version)
    files = baked_files(decide(read(Source.at(copy_of(root, tmp_path))), Settings()))
    results = {"": simulate("-c", EAGER, path=tmp_path, imported=(), TE_GRAPH_FIXES="off")}
    for (path, (_, text)), (following, _) in pairwise([*files.items(), ("", ("", ""))]):
        (tmp_path / path).write_text(text)
        if not following.startswith("transformer_engine/pytorch/_te_"):  # nothing imports the added modules before
            results[path] = simulate("-c", EAGER, path=tmp_path, imported=(), TE_GRAPH_FIXES="off")
    assert set(results.values()) == {results[""]}, results
    assert list(results)[-2:] == ["transformer_engine/pytorch/graph.py", "transformer_engine/te-graph-fixes.json"]
