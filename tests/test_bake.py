"""``te-graph-fixes bake`` on copies of published TransformerEngines (TE): all, nothing, and back again."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import te_graph_fixes
from te_graph_fixes import bake
from te_graph_fixes.cli import main
from te_graph_fixes.fix import NOT_NEEDED, UNRECOGNIZED
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.settings import DISABLE, Settings
from te_graph_fixes.source import Source
from te_graph_fixes.stamp import above
from te_graph_fixes.verdicts import Decision, verdicts
from tests.published import COVERED, needed, source

GRAPH = "transformer_engine/pytorch/graph.py"


def copy(folder: Path, version: str = "2.12.0") -> Path:
    """A site-packages folder with the Python files of a TE, some of them compiled."""
    copy_of(source(version), folder)
    for name in ("graph.py", "__init__.py", "module/base.py"):
        compiled = folder / "transformer_engine" / "pytorch" / name
        subprocess.run([sys.executable, "-m", "py_compile", compiled], check=True)
    return folder


def copy_of(root: Path, folder: Path) -> Path:
    """A folder with the Python files of the TE that another holds, but those for JAX, and its metadata."""
    package = root / "transformer_engine"
    python = [path for path in package.rglob("*.py") if "jax" not in path.parts]
    for path in (*root.glob("transformer_engine-*.dist-info/METADATA"), *python):
        place = folder / path.relative_to(root)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(path.read_bytes())
    return folder


def content(tree: Path) -> dict[str, tuple[int, int, str]]:
    """Every file of a tree: its permissions, the time when it was changed, and its content."""
    files = [path for path in tree.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(tree)): (
            path.stat().st_mode,
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in files
    }


def modules(tree: Path) -> dict[str, str]:
    return {name: found for name, (*_, found) in content(tree).items() if name.endswith(".py") and "/." not in name}


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    return (status, *capsys.readouterr())


@pytest.mark.parametrize("version", COVERED)
def test_a_bake_and_its_undo(version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = copy(tmp_path, version)
    before = content(tree)
    targets = {name for verdict in needed(version).values() for name in verdict.targets}
    expected = {bake.module_path(Source.at(tree), name) for name in targets}
    status, out, _ = run(capsys, "bake", "--te", tree)
    assert status == 0
    assert out.startswith(f"{len(needed(version))} fixes are now in TransformerEngine {version} in {tree}")
    was = {name: digest for name, (*_, digest) in before.items()}
    assert {name for name, digest in modules(tree).items() if was.get(name) != digest} == expected

    found = verdicts(Source.at(tree))
    assert not [fix for fix, verdict in found.items() if verdict.verdict == UNRECOGNIZED]
    assert {fix for fix, verdict in found.items() if "corrected on disk by" in verdict.reason} == set(needed(version))
    assert run(capsys, "status", "--te", tree)[0] == 0

    baked = content(tree)
    assert run(capsys, "bake", "--te", tree)[0] == 0
    assert content(tree) == baked
    assert run(capsys, "diff", "--te", tree)[:2] == (0, "")
    assert run(capsys, "bake", "--undo", "--te", tree)[0] == 0
    assert content(tree) == before
    assert run(capsys, "bake", "--undo", "--te", tree)[0] == 1


def test_a_bake_is_what_diff_and_patch_make(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patched, baked = copy(tmp_path / "patched"), copy(tmp_path / "baked")
    out = run(capsys, "diff", "--te", patched)[1]
    subprocess.run(["patch", "-p1", "--fuzz=0"], input=out, text=True, cwd=patched, check=True, capture_output=True)
    assert run(capsys, "bake", "--te", baked)[0] == 0
    assert modules(patched) == modules(baked)


def test_bytecode_is_that_of_the_new_text(tmp_path: Path) -> None:
    tree = copy(tmp_path)
    assert main(["bake", "--te", str(tree)]) == 0
    (compiled,) = (tree / GRAPH).parent.glob("__pycache__/graph.*.pyc")
    text = (tree / GRAPH).stat()
    said = compiled.read_bytes()[8:16]
    assert said == (int(text.st_mtime) & 0xFFFFFFFF).to_bytes(4, "little") + text.st_size.to_bytes(4, "little")


def test_permissions_and_links_stay(tmp_path: Path) -> None:
    tree = copy(tmp_path / "tree")
    graph, quantization = tree / GRAPH, tree / "transformer_engine/pytorch/quantization.py"
    graph.chmod(0o440)
    real, shared = tmp_path / "real.py", tmp_path / "shared.py"
    os.rename(quantization, real)
    quantization.symlink_to(real)
    base = tree / "transformer_engine/pytorch/module/base.py"
    os.link(base, shared)
    before = content(tree), shared.read_bytes()
    assert main(["bake", "--te", str(tree)]) == 0
    assert graph.stat().st_mode & 0o777 == 0o440
    assert quantization.is_symlink()
    assert "Corrected on disk" in real.read_text()
    assert (shared.read_bytes(), base.samefile(shared)) == (before[1], False)
    assert main(["bake", "--undo", "--te", str(tree)]) == 0
    assert (content(tree), shared.read_bytes()) == before
    assert quantization.is_symlink()
    assert base.samefile(shared)


WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.chmod", "os.chown", "shutil.rmtree"}
NEED_SPACE = {"os.mkdir", "os.link", "open"}


def in_child(work: Callable[[], object], at_write: Callable[[int, str], None]) -> int:
    """Call ``work`` in a fork, and before each write there ``at_write`` with its number; returns how it ended."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        count = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if opened or event in WRITES:
                count += 1
                at_write(count, event)

        sys.addaudithook(hook)
        work()
        status = 0
    except bake.BakeError:
        status = 3
    finally:
        os._exit(status)


def kill_at(number: int) -> Callable[[int, str], None]:
    def at_write(count: int, event: str) -> None:
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return at_write


def full_from(number: int) -> Callable[[int, str], None]:
    """A disk on which, from one write on, only what needs no space can be done."""

    def at_write(count: int, event: str) -> None:
        if count >= number and event in NEED_SPACE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return at_write


def small(folder: Path) -> tuple[Path, Decision]:
    """A TE of which one module is to be changed and one to be added, without the modules that stay as they are."""
    tree = copy(folder)
    decision = Decision(Source.at(tree), Settings(frozenset({"rng-states-at-replay"})))
    for path in tree.rglob("*.py"):
        if path != tree / GRAPH and path.name != "__init__.py":
            path.unlink()
    return tree, decision


def importable(tree: Path) -> bool:
    """Whether nobody who imports TE there is stopped by the guard."""
    return "te-graph-fixes bake" not in (tree / "transformer_engine/pytorch/__init__.py").read_text()


def test_killed_at_any_write(tmp_path: Path) -> None:
    tree, decision = small(tmp_path)
    location = tree / "transformer_engine"
    before, original = content(tree), modules(tree)
    assert in_child(lambda: bake.in_place(decision), lambda *_: None) == 0
    after = modules(tree)
    undoing = 0
    for number in range(1, 1000):
        ended = in_child(lambda: bake.undo(location), kill_at(number))
        assert not importable(tree) or modules(tree) in (original, after), f"half undone at write {number}"
        bake.recover(location)
        assert modules(tree) in (original, after)
        if modules(tree) == original:
            assert content(tree) == before
            assert in_child(lambda: bake.in_place(decision), lambda *_: None) == 0
        undoing = number
        if ended == 0:
            break
    assert undoing > 15
    bake.undo(location)
    for number in range(1, 1000):
        ended = in_child(lambda: bake.in_place(decision), kill_at(number))
        whole = modules(tree) == after
        assert not importable(tree) or whole or modules(tree) == original, f"half done at write {number}"
        bake.recover(location)
        assert modules(tree) == (after if (location / bake.KEPT).exists() else original)
        if (location / bake.KEPT).exists():
            bake.undo(location)
        assert content(tree) == before
        if ended == 0:
            break
    assert number > 30


def test_a_full_disk_at_any_write(tmp_path: Path) -> None:
    tree, decision = small(tmp_path)
    location = tree / "transformer_engine"
    before = content(tree)
    for number in range(1, 1000):
        ended = in_child(lambda: bake.in_place(decision), full_from(number))
        if ended == 0:
            break
        assert ended == 3
        assert content(tree) == before, number
    assert number > 30
    baked = content(tree)
    for number in range(1, 1000):
        ended = in_child(lambda: bake.undo(location), full_from(number))
        if ended == 0:
            break
        assert ended == 3
        assert {**content(tree), "guard": None} == {**baked, "guard": None}
    assert content(tree) == before


def test_a_site_packages_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tree = copy(tmp_path)
    for path in (*tree.rglob("*"), tree):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = content(tree)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != tree:
            folder.chmod(folder.stat().st_mode | 0o055)

    def as_somebody_else() -> int:
        if os.getuid() == 0:
            os.setuid(65534)
        os._exit(main(["bake", "--te", str(tree)]))

    assert in_child(as_somebody_else, lambda *_: None) == 1
    err = capfd.readouterr().err
    assert "Permission denied. Nothing was changed; `te-graph-fixes bake --overlay DIR` writes elsewhere" in err
    assert content(tree) == before
    for path in (tree, *tree.rglob("*")):
        path.chmod(0o755)


def test_what_is_not_recognised_fails_the_build(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = copy(tmp_path)
    graph = tree / GRAPH
    graph.write_text(graph.read_text().replace("def _make_graphed_callables(", "def _renamed("))
    before = content(tree)
    status, out, err = run(capsys, "bake", "--te", tree)
    assert (status, out) == (1, "")
    assert "nothing was changed, since not every fix that is needed can be applied. backward-amax-reduction: " in err
    assert content(tree) == before
    assert run(capsys, "bake", "--te", tree, "--overlay", tmp_path / "overlay")[0] == 1
    assert not (tmp_path / "overlay").exists()


def test_another_version_of_the_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = copy(tmp_path)
    with monkeypatch.context() as older:
        older.setattr(bake, "__version__", "0.0.9")
        assert run(capsys, "bake", "--te", tree)[0] == 0
    before = content(tree)
    status, _, err = run(capsys, "bake", "--te", tree)
    assert status == 1
    assert "te-graph-fixes 0.0.9 has corrected" in err
    assert "Take that back with `te-graph-fixes bake --undo`" in err
    assert content(tree) == before
    assert run(capsys, "bake", "--undo", "--te", tree)[0] == run(capsys, "bake", "--te", tree)[0] == 0


def test_what_is_left_out_stays_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = copy(tmp_path)
    monkeypatch.setenv(DISABLE, "replay-arguments")
    assert run(capsys, "bake", "--te", tree)[0] == 0
    assert run(capsys, "status", "--te", tree)[0] == run(capsys, "bake", "--te", tree)[0] == 0
    monkeypatch.delenv(DISABLE)
    verdict = verdicts(Source.at(tree))["replay-arguments"]
    assert verdict.verdict == UNRECOGNIZED
    assert "has corrected this TransformerEngine on disk without it" in verdict.reason
    status, _, err = run(capsys, "bake", "--te", tree)
    assert status == 1
    assert "on disk without replay-arguments. Take that back" in err
    assert run(capsys, "diff", "--te", tree)[:2] == (1, "")


def change(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def edit(old: str, new: str) -> Callable[[Path], object]:
    return lambda tree: change(tree / GRAPH, old, new)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a line is edited": (edit("import contextlib", "import contextlib as c"), "graph was changed"),
    "a comment is edited": (edit("# Copyright", "# copyright"), "graph was changed"),
    "a line is appended": (edit("# sha256 of all", "X = 1\n# sha256 of all"), "graph was changed"),
    "a line stands behind": (lambda tree: append(tree / GRAPH, "X = 1\n"), "graph was changed"),
    "an entry is added": (edit("# made: ", "# made: another-fix, "), "graph was changed"),
    "an entry is dropped": (edit("tuple-samples", "none-outputs"), "graph was changed"),
    "the digest is edited": (edit("of all above: ", "of all above: 0"), "graph was changed"),
    "the stamp is taken off": (
        lambda tree: (tree / GRAPH).write_text(above((tree / GRAPH).read_text())),
        "graph is not as te-graph-fixes has written it",
    ),
    "an added module is edited": (
        lambda tree: change(tree / "transformer_engine/pytorch/_te_graph_order.py", "import", "import os, "),
        "_te_graph_order was changed",
    ),
    "an added module is gone": (
        lambda tree: (tree / "transformer_engine/pytorch/_te_graph_order.py").unlink(),
        "_te_graph_order is not as te-graph-fixes has written it",
    ),
}


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = copy(tmp_path_factory.mktemp("baked"))
    assert main(["bake", "--te", str(tree)]) == 0
    return tree


@pytest.mark.parametrize("kind", CHANGES)
def test_what_was_changed_later_is_said(
    kind: str, baked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(baked, tree)
    work, reason = CHANGES[kind]
    work(tree)
    found = verdicts(Source.at(tree))
    assert {verdict.verdict for verdict in found.values()} == {UNRECOGNIZED}
    assert all(verdict.reason.startswith(reason) for verdict in found.values()), found["warmup-reset"].reason
    before = content(tree)
    assert run(capsys, "bake", "--te", tree)[0] == 1
    status, _, err = run(capsys, "bake", "--undo", "--te", tree)
    if kind == "an added module is gone":
        assert (status, (tree / GRAPH).read_bytes()) == (0, (source("2.12.0") / GRAPH).read_bytes())
        return
    assert (status, content(tree)) == (1, before)
    assert "changed after the bake: put that back first, then undo" in err


def test_a_te_that_was_installed_over_a_bake(baked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(baked, tree)
    for name in modules(copy(tmp_path / "new", "2.14.0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / "new" / name, tree / name)
    assert run(capsys, "bake", "--te", tree)[0] == 1
    assert run(capsys, "bake", "--undo", "--te", tree)[0] == 0
    assert (tree / GRAPH).read_bytes() == (source("2.14.0") / GRAPH).read_bytes()
    assert run(capsys, "bake", "--te", tree)[0] == 0


def test_every_added_module_has_a_stamp(baked: Path) -> None:
    added = [*(baked / "transformer_engine/pytorch").glob("_te_*.py")]
    assert added
    assert all("\n# Corrected on disk by te-graph-fixes " in path.read_text() for path in added)


def test_an_interrupted_bake_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree, decision = small(tmp_path)
    before = content(tree)
    for number in range(1, 1000):
        bake.recover(tree / "transformer_engine")
        in_child(lambda: bake.in_place(decision), kill_at(number))
        if not importable(tree):
            break
    with pytest.raises(RuntimeError, match="was interrupted"):
        exec((tree / "transformer_engine/pytorch/__init__.py").read_text())
    assert "was interrupted" in verdicts(Source.at(tree))["warmup-reset"].reason
    status, _, err = run(capsys, "bake", "--undo", "--te", tree)
    assert (status, err) == (0, "te-graph-fixes: took back what an interrupted command had left\n")
    assert content(tree) == before


def test_an_overlay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree, folder = copy(tmp_path / "image"), tmp_path / "overlay"
    before = content(tree)
    status, out, _ = run(capsys, "bake", "--te", tree, "--overlay", folder)
    assert status == 0
    assert content(tree) == before
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    assert (manifest["te_version"], manifest["te_graph_fixes_version"]) == ("2.12.0", te_graph_fixes.__version__)
    assert set(manifest["fixes"]) == set(CATALOGUE)
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert written == {"MANIFEST.json", *(each["path"] for each in manifest["files"])}
    for each in manifest["files"]:
        pair = f"{folder / each['path']}:{tree / each['path']}"
        for mount in (f"-v {pair}:ro", f"--mount {pair}", f"{pair}:ro,"):
            assert mount in f"{out.replace(chr(10), ',')}", mount
        assert f"mountPath: {tree / each['path']}, subPath: {each['path']}, readOnly" in out

    status, _, err = run(capsys, "status", "--te", tree, "--overlay", folder)
    assert status == 1
    assert f"{tree / GRAPH} is not mounted: TransformerEngine's own is there" in err
    for each in manifest["files"]:
        shutil.copy(folder / each["path"], tree / each["path"])
    assert run(capsys, "status", "--te", tree, "--overlay", folder)[0] == 0
    found = verdicts(Source.at(tree))
    assert {verdict.verdict for verdict in found.values()} <= {NOT_NEEDED, "not-applicable"}
    change(tree / GRAPH, "import", "import os,")
    assert "neither the overlay's nor" in run(capsys, "status", "--te", tree, "--overlay", folder)[2]
    assert run(capsys, "status", "--te", source("2.14.0"), "--overlay", folder)[0] == 1
    assert "the overlay is for 2.12.0" in run(capsys, "status", "--te", source("2.14.0"), "--overlay", folder)[2]
    assert "no overlay in" in run(capsys, "status", "--te", tree, "--overlay", tmp_path)[2]
    assert "is not empty" in run(capsys, "bake", "--te", source("2.12.0"), "--overlay", tmp_path)[2]
    assert run(capsys, "bake", "--te", source("2.12.0"), "--overlay", folder)[0] == 0
