"""``te-graph-fixes bake`` on copies of published TransformerEngines (TE): all, nothing, and back again."""

from __future__ import annotations

import compileall
import hashlib
import itertools
import json
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

import te_graph_fixes
from te_graph_fixes.commands import bake
from te_graph_fixes.commands.cli import main
from te_graph_fixes.decision import Decision, verdicts
from te_graph_fixes.fix import NOT_NEEDED, UNRECOGNIZED
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.source import Source
from te_graph_fixes.settings import DISABLE, SWITCH, Settings
from tests.commands.test_cli import RENAMED, altered, copy_of
from tests.support.child import ROOT, Cli
from tests.support.published import COVERED, needed, source

GRAPH = "transformer_engine/pytorch/graph.py"


def copy(folder: Path, version: str = "2.12.0") -> Path:
    """A site-packages folder with the Python files of a TE, some of them compiled."""
    copy_of(source(version), folder)
    for name in ("graph.py", "__init__.py", "module/base.py"):
        py_compile.compile(str(folder / "transformer_engine" / "pytorch" / name))
    return folder


def content(tree: Path) -> dict[str, tuple[int, int, str]]:
    """Every file of a tree: its permissions, the time when it was changed, and its content."""
    return {
        str(path.relative_to(tree)): (path.stat().st_mode, path.stat().st_mtime_ns, digest(path))
        for path in tree.rglob("*")
        if path.is_file()
    }


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def modules(tree: Path) -> dict[str, str]:
    return {name: found for name, (*_, found) in content(tree).items() if name.endswith(".py") and "/." not in name}


@pytest.mark.parametrize("version", COVERED)
def test_a_bake_and_its_undo(version: str, tmp_path: Path, cli: Cli) -> None:
    tree = copy(tmp_path, version)
    before = content(tree)
    targets = {name for verdict in needed(version).values() for name in verdict.targets}
    expected = {bake.module_path(Source.at(tree), name) for name in targets}
    status, out, _ = cli("bake", "--te", tree)
    assert status == 0
    assert out.startswith(f"{len(needed(version))} fixes are now in TransformerEngine {version} in {tree}")
    was = {name: digest for name, (*_, digest) in before.items()}
    assert {name for name, digest in modules(tree).items() if was.get(name) != digest} == expected

    found = verdicts(Source.at(tree))
    assert not [fix for fix, verdict in found.items() if verdict.verdict == UNRECOGNIZED]
    assert {fix for fix, verdict in found.items() if "corrected on disk by" in verdict.reason} == set(needed(version))
    assert cli("status", "--te", tree)[0] == 0
    (compiled,), text = (tree / GRAPH).parent.glob("__pycache__/graph.*.pyc"), (tree / GRAPH).stat()
    times = (int(number) & 0xFFFFFFFF for number in (text.st_mtime, text.st_size))
    assert compiled.read_bytes()[8:16] == b"".join(number.to_bytes(4, "little") for number in times)

    baked = content(tree)
    assert cli("bake", "--te", tree)[0] == 0
    assert content(tree) == baked
    assert cli("diff", "--te", tree)[:2] == (0, "")
    assert cli("bake", "--undo", "--te", tree)[0] == 0
    assert content(tree) == before
    assert cli("bake", "--undo", "--te", tree)[0] == 1


def test_a_bake_is_what_diff_and_patch_make(tmp_path: Path, cli: Cli) -> None:
    patched, baked = copy(tmp_path / "patched"), copy(tmp_path / "baked")
    out = cli("diff", "--te", patched)[1]
    subprocess.run(["patch", "-p1", "--fuzz=0"], input=out, text=True, cwd=patched, check=True, capture_output=True)
    assert cli("bake", "--te", baked)[0] == 0
    assert modules(patched) == modules(baked)


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


def test_a_file_system_without_hard_links(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    tree = copy(tmp_path)
    before = content(tree)
    monkeypatch.setattr(os, "link", refuse)
    assert cli("bake", "--te", tree)[0] == cli("bake", "--undo", "--te", tree)[0] == 0
    assert content(tree) == before


WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.chmod", "os.chown", "shutil.rmtree"}


def in_child(work: Callable[[], object], kill_at: int = 0) -> int:
    """Call ``work`` in a fork that is killed at a write, counted from 1; returns how it ended."""
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
                if count == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        work()
        status = 0
    finally:
        os._exit(status)


def small(folder: Path) -> Decision:
    """One fix, which changes one module and adds one, for a TE without the modules that it leaves as they are."""
    tree = copy(folder)
    decision = Decision(Source.at(tree), Settings(frozenset({"rng-states-at-replay"})))
    for path in tree.rglob("*.py"):
        if path != tree / GRAPH and path.name != "__init__.py":
            path.unlink()
    return decision


def whole(folder: Path) -> Decision:
    """All fixes, for a TE whose bytecode Python takes without a look at the text."""
    tree = copy_of(source("2.12.0"), folder)
    compileall.compile_dir(tree, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    return Decision(Source.at(tree), Settings())


def code(tree: Path, names: Iterable[str]) -> dict[str, Any]:
    """What Python would execute of each module, by its bytecode or its text; None where there is no such module."""
    loaders = {name: SourceFileLoader("module", str(tree / name)) for name in names}
    return {name: (tree / name).exists() and loader.get_code("module") for name, loader in loaders.items()}


@pytest.mark.parametrize("make", [small, pytest.param(whole, marks=pytest.mark.slow)])
def test_killed_at_any_write(make: Callable[[Path], Decision], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left is TE as it was, or corrected, or closed; what follows, and is not killed, does its work."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    tree, decision = tmp_path, make(tmp_path)
    location, closed = tree / "transformer_engine", compile(bake._CLOSED, "", "exec", dont_inherit=True)
    files = bake.corrected(decision)
    monkeypatch.setattr(bake, "corrected", lambda _: files)
    names = {bake.INIT, *(file.path for file in files)}
    before, original = content(tree), code(tree, names)

    def bake_it() -> None:
        bake.roll_back(location)
        if not (location / bake.KEPT).exists():
            bake.in_place(decision)

    def undo_it() -> None:
        bake.roll_back(location)
        if (location / bake.KEPT).exists():
            bake.undo(location)

    bake_it()
    baked = code(tree, names)
    for work, undone in ((undo_it, bake_it), (bake_it, undo_it)):
        for number in itertools.count(1):
            undone()
            ended = in_child(work, number)
            found = code(tree, names)
            assert found[bake.INIT] == closed or found in (original, baked), f"half done at write {number}"
            if ended == 0:
                break
            assert ended == -signal.SIGKILL
            in_child(bake_it, number % 13 + 1)
            found = code(tree, names)
            assert found[bake.INIT] == closed or found in (original, baked), f"half done after write {number}"
            following, wanted = ((bake_it, baked), (undo_it, original))[number % 2]
            following()
            assert code(tree, names) == wanted, number
        assert number > 15
    undo_it()
    assert content(tree) == before


FULL_DISK = """
import os, sys
from pathlib import Path
from te_graph_fixes.commands.cli import main
from tests.commands.test_bake import content, copy_of

disk = Path(sys.argv[1])
assert os.system(f"mount -t tmpfs -o size=64m none {disk}") == 0
tree = copy_of(Path(sys.argv[2]), disk / "tree")
before, statuses = content(tree), []
for free in range(0, 10_000_000, 400_000):
    disk.joinpath("ballast").write_bytes(b"")
    space = os.statvfs(disk)
    os.posix_fallocate(os.open(disk / "ballast", os.O_WRONLY), 0, space.f_bavail * space.f_frsize - free or 1)
    statuses.append(main(["bake", "--te", str(tree)]))
    if statuses[-1] == 0:
        break
    assert content(tree) == before, free
space = os.statvfs(disk)
os.posix_fallocate(os.open(disk / "rest", os.O_WRONLY | os.O_CREAT), 0, space.f_bavail * space.f_frsize or 1)
assert main(["bake", "--undo", "--te", str(tree)]) == 0
assert content(tree) == before
print(set(statuses), len(statuses))
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """A bake with ever more space left, from none on: nothing is changed, until all is. The undo needs no space."""
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", FULL_DISK]
    done = subprocess.run([*command, tmp_path, source("2.12.0")], cwd=ROOT, capture_output=True, text=True, check=False)
    if "unshare: unshare failed" in done.stderr:
        pytest.skip("this machine lets nobody mount")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("{0, 1} ")


def test_a_site_packages_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tree = copy(tmp_path)
    for path in (*tree.rglob("*"), tree):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = content(tree)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != tree:
            folder.chmod(folder.stat().st_mode | 0o055)

    def as_somebody_else() -> None:
        if os.getuid() == 0:
            os.setuid(65534)
        os._exit(main(["bake", "--te", str(tree)]))

    assert in_child(as_somebody_else) == 1
    err = capfd.readouterr().err
    assert "Permission denied. Nothing was changed; `te-graph-fixes bake --overlay DIR` writes elsewhere" in err
    assert content(tree) == before
    for path in (tree, *tree.rglob("*")):
        path.chmod(0o755)


def test_what_is_not_recognised_fails_the_build(tmp_path: Path, cli: Cli) -> None:
    tree = altered(tmp_path, "2.12.0", *RENAMED)
    before = content(tree)
    for arguments in ([], ["--overlay", tmp_path / "overlay"]):
        status, out, err = cli("bake", "--te", tree, *arguments)
        assert (status, out) == (1, "")
        assert "nothing was changed, because not every fix that is needed can be applied. backward-amax-red" in err
    assert content(tree) == before


def test_another_version_of_the_package(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = copy(tmp_path)
    with monkeypatch.context() as older:
        older.setattr(bake, "__version__", "0.0.9")
        assert cli("bake", "--te", tree)[0] == 0
    before = content(tree)
    status, _, err = cli("bake", "--te", tree)
    assert status == 1
    assert "te-graph-fixes 0.0.9 has corrected" in err
    assert "Take that back with `te-graph-fixes bake --undo`" in err
    assert content(tree) == before
    assert cli("bake", "--undo", "--te", tree)[0] == cli("bake", "--te", tree)[0] == 0


def test_what_is_left_out_stays_left_out(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = copy(tmp_path)
    monkeypatch.setenv(DISABLE, "replay-arguments")
    assert cli("bake", "--te", tree)[0] == 0
    assert cli("status", "--te", tree)[0] == cli("bake", "--te", tree)[0] == 0
    monkeypatch.delenv(DISABLE)
    verdict = verdicts(Source.at(tree))["replay-arguments"]
    assert verdict.verdict == UNRECOGNIZED
    assert "has corrected this TransformerEngine on disk without it" in verdict.reason
    status, _, err = cli("bake", "--te", tree)
    assert status == 1
    assert "on disk without replay-arguments. Take that back" in err
    assert cli("diff", "--te", tree)[:2] == (1, "")


@pytest.mark.parametrize(
    ("value", "status", "said"),
    [
        ("off", 1, r"^te-graph-fixes: nothing was changed: \d+ fixes are left out by TE_GRAPH_FIXES\n$"),
        ("none-outputs", 0, r" \(\d+ are left out by TE_GRAPH_FIXES\)\. Undo: te-graph-fixes bake --undo --source "),
    ],
)
def test_a_stray_variable_is_said(
    value: str, status: int, said: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = copy(tmp_path)
    before = content(tree)
    monkeypatch.setenv(SWITCH, value)
    found = cli("bake", "--te", tree)
    assert (found[0], content(tree) == before) == (status, bool(status))
    assert re.search(said, "".join(found[1:]))


def change(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    before, _, after = path.read_text().rpartition(old) if old else (path.read_text(), "", "")
    path.write_text(before + new + after)


ADDED = "transformer_engine/pytorch/_te_graph_order.py"
EDITED = "pytorch/graph.py is not as te-graph-fixes has written it: take"
CHANGES: dict[str, tuple[str, str, str, str]] = {
    "a line is edited": (GRAPH, "import contextlib", "import contextlib as c", EDITED),
    "a comment is edited": (GRAPH, "# Copyright", "# copyright", EDITED),
    "a line is appended": (GRAPH, "# sha256 of all", "X = 1\n# sha256 of all", EDITED),
    "a line stands behind": (GRAPH, "", "X = 1\n", EDITED),
    "an entry is added": (GRAPH, "# made: ", "# made: another-fix, ", EDITED),
    "an entry is dropped": (GRAPH, "tuple-samples", "none-outputs", EDITED),
    "the digest is edited": (GRAPH, "of all above: ", "of all above: 0", EDITED),
    "the stamp is taken off": (GRAPH, "# Corrected on disk", "# C", EDITED),
    "an added module is edited": (ADDED, "import", "import os, ", "pytorch/_te_graph_order.py is not as"),
    "an added module is gone": (ADDED, "", "", "pytorch/_te_graph_order.py is not as"),
}


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = copy(tmp_path_factory.mktemp("baked"))
    assert main(["bake", "--te", str(tree)]) == 0
    return tree


@pytest.mark.parametrize("kind", CHANGES)
def test_what_was_changed_later_is_said(kind: str, baked: Path, tmp_path: Path, cli: Cli) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(baked, tree)
    name, old, new, reason = CHANGES[kind]
    if old or new:
        change(tree / name, old, new)
    else:
        (tree / name).unlink()
    found = verdicts(Source.at(tree))
    assert {verdict.verdict for verdict in found.values()} == {UNRECOGNIZED}
    assert all(verdict.reason.startswith(reason) for verdict in found.values()), found["warmup-reset"].reason
    before = content(tree)
    status, out, _ = cli("status", "--te", tree)
    assert (status, len(out.splitlines())) == (1, 2)
    assert (
        "take the edit back, or install TransformerEngine anew and `te-graph-fixes bake --undo`" in out.splitlines()[0]
    )
    assert cli("bake", "--te", tree)[0] == 1
    status, _, err = cli("bake", "--undo", "--te", tree)
    if kind == "an added module is gone":
        assert (status, (tree / GRAPH).read_bytes()) == (0, (source("2.12.0") / GRAPH).read_bytes())
        return
    assert (status, content(tree)) == (1, before)
    assert "edited after the bake: take the edit back, or install TransformerEngine anew, and undo again" in err


@pytest.mark.parametrize("edited", ["quantization.py", "__init__.py"])
def test_no_edit_is_lost_in_an_undo(edited: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where all changed modules were edited, and not of the module that stands aside during a bake."""
    te = copy(tmp_path / "te", "2.15.0")
    monkeypatch.setenv(SWITCH, "skip-flag-accessors")
    assert cli("bake", "--source", te)[0] == 0
    path = te / "transformer_engine" / "pytorch" / edited
    text = path.read_text() + "# edited\n"
    path.unlink()
    path.write_text(text)
    status, _, err = cli("bake", "--undo", "--source", te)
    assert (status, "was edited after the bake" in err) == (1, True)
    assert path.read_text() == text


def test_a_te_that_was_installed_over_a_bake(baked: Path, tmp_path: Path, cli: Cli) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(baked, tree)
    for name in modules(copy(tmp_path / "new", "2.14.0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / "new" / name, tree / name)
    assert cli("bake", "--te", tree)[0] == 1
    assert cli("bake", "--undo", "--te", tree)[0] == 0
    assert (tree / GRAPH).read_bytes() == (source("2.14.0") / GRAPH).read_bytes()
    assert cli("bake", "--te", tree)[0] == 0


def test_an_interrupted_bake_is_said(tmp_path: Path, cli: Cli) -> None:
    tree, decision = tmp_path, small(tmp_path)
    before = content(tree)
    for number in itertools.count(1):
        in_child(lambda: bake.in_place(decision), number)
        if (tree / bake.INIT).read_bytes() == bake._CLOSED:
            break
        bake.roll_back(tree / "transformer_engine")
    assert "was interrupted" in verdicts(Source.at(tree))["warmup-reset"].reason
    said = "te-graph-fixes: took back what an interrupted command had left\n"
    assert cli("bake", "--undo", "--te", tree)[::2] == (0, said)
    assert content(tree) == before


def test_an_overlay(tmp_path: Path, cli: Cli) -> None:
    tree, folder = copy(tmp_path / "image"), tmp_path / "overlay"
    before = content(tree)
    status, out, _ = cli("bake", "--te", tree, "--overlay", folder)
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

    status, _, err = cli("status", "--te", tree, "--overlay", folder)
    assert status == 1
    files = len(manifest["files"])
    assert re.fullmatch(
        rf"te-graph-fixes: {files} of {files} files are not mounted, first {tree}/\S+: mount what .*\n", err
    )
    for each in manifest["files"]:
        shutil.copy(folder / each["path"], tree / each["path"])
    assert cli("status", "--te", tree, "--overlay", folder)[0] == 0
    found = verdicts(Source.at(tree))
    assert {verdict.verdict for verdict in found.values()} <= {NOT_NEEDED, "not-applicable"}
    change(tree / GRAPH, "import", "import os,")
    assert "neither the overlay's nor" in cli("status", "--te", tree, "--overlay", folder)[2]
    status, _, err = cli("status", "--te", source("2.14.0"), "--overlay", folder)
    assert (status, "what it was made of, which is TransformerEngine 2.12.0: make the overlay again" in err) == (
        1,
        True,
    )
    missing = f"te-graph-fixes: no overlay in {tmp_path}: MANIFEST.json: No such file or directory\n"
    assert cli("status", "--te", tree, "--overlay", tmp_path)[2] == missing
    assert "is not empty" in cli("bake", "--te", source("2.12.0"), "--overlay", tmp_path)[2]
    assert cli("bake", "--te", source("2.12.0"), "--overlay", folder)[0] == 0
