"""Test ``te-graph-fixes bake`` and its undo on copies of published TransformerEngines (TE), and on a small stand-in."""

from __future__ import annotations

import compileall
import errno
import fcntl
import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from py_compile import PycInvalidationMode
from types import SimpleNamespace
from typing import Any

import pytest

from te_graph_fixes import __version__, manifest
from te_graph_fixes.commands import bake
from te_graph_fixes.commands.cli import main
from te_graph_fixes.fix import Fix
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.settings import DISABLE, SWITCH
from tests.support.child import ROOT, Cli, python
from tests.support.published import COVERED, copy_of, needed, source

PYTORCH = "transformer_engine/pytorch"
ADDED, BASE, GRAPH = (f"{PYTORCH}/{name}.py" for name in ("_te_parameter_hooks", "module/base", "graph"))
MANIFEST = f"transformer_engine/{manifest.NAME}"
TEXT = "def run():\n    return 1\n"
FIXES = {
    fix_id: fix.described_by(fix_id, "Bug: it returns 1.")
    for fix_id, fix in {
        "none-outputs": Fix("", "\n@@ module/base.py run\n-return 1\n+return 2\n", merged="2.17"),
        "replay-arguments": Fix("", "\n@@ graph.py run\n+from ._te_parameter_hooks import x\n return 1\n"),
        "warmup-reset": Fix("", "\n@@ quantization.py run\n-return 1\n+return 3\n", requires=("replay-arguments",)),
    }.items()
}
"""A small catalogue of fixes. They have the ids of real fixes, because settings accept no other ids."""


def content(tree: Path) -> dict[str, tuple[int, int, str | None]]:
    """Return, by path, the mode, modification time and digest of every file in a tree, except bytecode."""
    return {
        str(path.relative_to(tree)): (path.lstat().st_mode, path.lstat().st_mtime_ns, manifest.file_digest(path))
        for path in tree.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def modules(tree: Path) -> dict[str, str | None]:
    return {name: found for name, (*_, found) in content(tree).items() if name.endswith(".py")}


def code(tree: Path) -> list[Any]:
    """Return the code that Python would run for each module of a bake, or None for a missing module."""
    paths = [tree / name for name in (ADDED, BASE, f"{PYTORCH}/quantization.py", GRAPH)]
    return [SourceFileLoader("m", str(path)).get_code("m") if path.exists() else None for path in paths]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a stand-in for TE with three bugs in three modules. A bake adds a fourth module.

    Python runs the bytecode of the modules without comparing it with their texts.
    """
    for fix_id in [*reversed(CATALOGUE)]:  # monkeypatch restores in reverse, so the catalogue keeps its order
        monkeypatch.delitem(CATALOGUE, fix_id)
    for fix_id, fix in FIXES.items():
        monkeypatch.setitem(CATALOGUE, fix_id, fix)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return stand_in(tmp_path / "te", "2.12.0", TEXT)


def stand_in(tree: Path, version: str, text: str) -> Path:
    for name in ("/../__init__", "/__init__", "/module/__init__", "/module/base", "/quantization", "/graph"):
        file = tree / f"{PYTORCH}{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("" if "__" in name else text)
    (tree / f"transformer_engine-{version}.dist-info").mkdir()
    (tree / f"transformer_engine-{version}.dist-info/METADATA").write_text(f"Name: x\nVersion: {version}\n")
    compileall.compile_dir(tree, quiet=1, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
    return tree


@pytest.mark.parametrize("version", ["2.10.0", COVERED[-1]])
def test_a_bake_and_its_undo(version: str, tmp_path: Path, cli: Cli) -> None:
    tree, patched = (copy_of(source(version), tmp_path / name) for name in ("tree", "patched"))
    before = content(tree)
    changed = {f"{name.replace('.', '/')}.py" for fix in needed(version).values() for name in fix.targets}
    missing = f"Not all needed fixes are baked. Run:\n  te-graph-fixes bake --source {tree}\n"
    status, out, _ = cli("bake", "--check", "--source", tree)
    assert (status, out.partition("\n")[2], content(tree)) == (1, missing, before)
    patch = cli("diff", "--source", patched)[1]
    done = f"Baked {len(needed(version))} fixes into TransformerEngine {version} ({len(changed)} modules in "
    undo = f"{tree}/transformer_engine). Undo:\n  te-graph-fixes bake --undo --source {tree}\n"
    assert cli("bake", "--source", tree)[:2] == (0, done + undo)
    assert {name for name, found in modules(tree).items() if before.get(name, ("",))[-1] != found} == changed
    baked = content(tree)
    for command in ("status", "bake --check", "bake"):
        status, out, _ = cli(*command.split(), "--source", tree)
        assert (status, f" are baked by te-graph-fixes {__version__}." in out.splitlines()[0]) == (0, True)
    assert (cli("diff", "--source", tree)[:2], content(tree)) == ((0, ""), baked)
    subprocess.run(["patch", "-p1", "--fuzz=0"], input=patch, text=True, cwd=patched, check=True, capture_output=True)
    assert (modules(patched), (patched / MANIFEST).read_text()) == (modules(tree), (tree / MANIFEST).read_text())
    assert cli("bake", "--check", "--source", patched)[0] == 0
    assert "To revert a patch, use `patch -p1 -R`" in cli("bake", "--undo", "--source", patched)[2]
    done = f"Undid the bake of te-graph-fixes {__version__}: {len(changed)} modules restored or deleted in "
    assert cli("bake", "--undo", "--source", tree)[:2] == (0, f"{done}{tree}/transformer_engine\n")
    assert (content(tree), cli("bake", "--undo", "--source", tree)[0]) == (before, 1)


def test_permissions_owners_and_links_stay(small: Path, tmp_path: Path) -> None:
    """A bake must replace a link with a file, so that the target of the link does not change for other users."""
    owner, (graph, base) = 1234 if os.getuid() == 0 else os.getuid(), (small / GRAPH, small / BASE)
    quantization = small / PYTORCH / "quantization.py"
    for path in small.rglob("*"):
        os.chown(path, owner, os.getgid())
    graph.chmod(0o440)
    os.rename(quantization, tmp_path / "real.py")
    quantization.symlink_to(tmp_path / "real.py")
    os.link(base, tmp_path / "shared.py")
    before = content(tmp_path)
    assert in_child(lambda: (os.umask(0o077), main(["bake", "--source", str(small)]))[1]) == 0
    owned = {path.stat() for path in small.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert {(stat.st_mode & 0o777, stat.st_uid) for stat in owned} == {(0o644, owner), (0o440, owner)}
    assert (graph.stat().st_mode & 0o777, quantization.is_symlink()) == (0o440, False)
    assert content(tmp_path).items() >= {name: before[name] for name in ("real.py", "shared.py")}.items()
    assert main(["bake", "--undo", "--source", str(small)]) == 0
    assert (content(tmp_path), quantization.readlink()) == (before, tmp_path / "real.py")
    assert {path.lstat().st_uid for path in small.rglob("*.py") if not path.is_symlink()} == {owner}
    assert base.samefile(tmp_path / "shared.py")


WRITES = {"os.mkdir", "os.rename", "os.remove", "os.link", "os.chmod", "os.chown"}


def in_child(work: Callable[[], int], at: int = 0, stop: int = 0) -> int:
    """Call ``work`` in a fork, stop the fork at its write number ``at`` (0: never), and return its exit code
    (-N after signal N).

    ``stop`` is the signal that stops the fork, or ENOSPC to simulate a disk that is full from this write on.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status, writes = 99, itertools.count(1)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        creates = event == "os.link" or (event == "open" and arguments[1] is not None and "w" in arguments[1])
        if not at or not (creates or event in WRITES) or (number := next(writes)) < at:
            return
        if stop == errno.ENOSPC and (creates or number == at):
            if event == "open" and number == at:
                os.write(os.open(arguments[0], os.O_WRONLY | os.O_CREAT), b"de")  # the beginning of the new text
            raise OSError(stop, os.strerror(stop), arguments[0])
        if number == at:
            os.kill(os.getpid(), stop)

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the shell of the tests may ignore both signals
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        sys.addaudithook(hook)
        status = work()
    finally:
        os._exit(status)


def commands_for(tree: Path) -> list[list[str]]:
    return [["bake", "--source", str(tree)], ["bake", "--undo", "--source", str(tree)]]


@pytest.mark.parametrize("stop", [errno.ENOSPC, *bake.SIGNALS, signal.SIGKILL])
def test_stopped_at_each_write(stop: int, small: Path, cli: Cli) -> None:
    """A stopped bake restores all modules, and an undo completes despite a signal.

    After SIGKILL, or after a write error of an undo, the first modules are baked and the others are TE's own, until
    the next bake or undo finishes the work.
    """
    commands, before, original = commands_for(small), content(small), code(small)
    assert main(commands[0]) == 0
    baked, statuses, counts = code(small), set(), set[str]()
    for undoes in (True, False):
        for at in itertools.count(1):
            main(commands[not undoes])
            status = in_child(lambda: main(commands[undoes]), at, stop)  # noqa: B023
            if status == 0:
                assert at > (8 if undoes else 30)
                break
            statuses.add(status)
            said, found = cli("status", *commands[0][1:])[1], code(small)
            counts |= {*re.findall(r"interrupted or is running, .*: (\d) of 4 modules", said)}
            assert found == (original if "can be fixed" in said else baked) or "interrupted" in said
            if stop == signal.SIGKILL or (undoes and stop == errno.ENOSPC):
                assert found in [baked[:number] + original[number:] for number in range(5)]
                in_child(lambda: main(commands[0]), at % 17 + 1, stop)
                assert main(commands[at % 2]) in (0, 1)
                assert code(small) == (baked, original)[at % 2]
            else:
                assert content(small) == before, at
    assert statuses == {{errno.ENOSPC: 1, signal.SIGKILL: -9}.get(stop, 130)}
    assert counts == (set("0123") if stop in (errno.ENOSPC, signal.SIGKILL) else set())
    main(commands[1])
    assert content(small) == before


def test_a_bake_that_nohup_started(small: Path) -> None:
    ignore = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    assert in_child(lambda: (ignore(), main(commands_for(small)[0]))[1], 17, signal.SIGHUP) == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root may lock files with chattr or mount")
@pytest.mark.parametrize(("lock", "unlock"), [("chattr +i", "chattr -i"), ("mount --bind {}", "umount")])
def test_a_file_that_is_immutable_or_mounted(lock: str, unlock: str, small: Path, cli: Cli) -> None:
    """If a file cannot be replaced, the error must name the file, and a bake must change nothing.

    An undo must succeed once the file can be replaced.
    """
    before, base = content(small), small / BASE
    for option in ([], ["--undo"]):
        if subprocess.run([*lock.format(base).split(), base], capture_output=True, check=False).returncode:
            pytest.skip(f"`{lock}` is not permitted here")
        status, _, err = cli("bake", *option, "--source", small)
        subprocess.run([*unlock.split(), base], check=True)
        assert (status, f"Cannot write {base}: " in err) == (1, True)
        assert ("interrupted" in cli("status", "--source", small)[1]) == (option != [])
        assert option or content(small) == before
        assert cli("bake", *option, "--source", small)[0] == 0
    assert content(small) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_another_user(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bake", "--source", str(small)]) == 0
    for folder in small.parents:
        folder.chmod(folder.stat().st_mode | 0o055)
    before = content(small)
    for option, wanted in (("--check", 0), ("--undo", 1)):
        assert in_child(lambda: (os.setuid(65534), main(["bake", option, "--source", str(small)]))[1]) == wanted  # noqa: B023
    assert re.search(r"Cannot write .*graph.py: Permission denied\. Check TE with ", capfd.readouterr().err)
    assert content(small) == before


def append(*names: str) -> Callable[[Path], None]:
    def change(tree: Path) -> None:
        for name in names:
            (tree / name).write_text((tree / name).read_text() + "X = 1\n")
        metadata = next(tree.glob("*.dist-info/METADATA"))  # a new version alone does not mean a reinstalled TE
        metadata.write_text(f"{metadata.read_text().strip()}+local\n")

    return change


def manifest_with(changed: dict[str, Any] | str) -> Callable[[Path], None]:
    def change(tree: Path) -> None:
        text = json.dumps(json.loads((tree / MANIFEST).read_text()) | changed) if isinstance(changed, dict) else changed
        (tree / MANIFEST).write_text(text)

    return change


def install_over(version: str, text: str) -> Callable[[Path], None]:
    """Return a function that installs another TE over a tree like pip, which keeps the files that a bake added."""

    def change(tree: Path) -> None:
        shutil.rmtree(next(tree.glob("*.dist-info")))
        stand_in(tree, version, text)

    return change


HALF = "interrupted or is running, or TransformerEngine was reinstalled: {} of 4 modules are baked"
ZEROS, ONES = "0" * 64, "1" * 64
INVALID: tuple[dict[str, Any] | str, ...] = (
    *("", "null", "[" * 99999, "{}", {"files": {}}, {"files": None}, {"fixes": None}, {"functions": []}),
    *({"fixes": {"warmup-reset": {}}}, {"version": "\ud800"}, {"te_version": []}, {"functions": {"x": None}}),
    {"version": 1},
    *({"functions": {"x": [place]}} for place in ("os:system", "transformer_engine.x", "transformer_engine.x:y\n")),
    *({"files": {GRAPH: each}} for each in (None, [], ["0", "1"], [None, ZEROS], ["", ZEROS], [ZEROS, None], [1, 2])),
    *({"files": {path: [ZEROS, ONES]}} for path in ("graph.py", "/etc/passwd", "transformer_engine/../x.py", "")),
    *({"files": {path: [ZEROS, ONES]}} for path in ("transformer_engine/\ud800.py", f"{GRAPH}\n")),
)
COMMANDS = "status", "bake --check", "bake", "bake --undo", "bake --undo --force"


@pytest.mark.parametrize(
    ("change", "statuses", "said"),
    [
        (append(), "00000", ""),
        (append(GRAPH), "11110", f"changed .*: {GRAPH}. .*discard it with `te-graph-fixes bake --undo --force`"),
        (append(ADDED, BASE), "11110", f"changed .*: {ADDED}, {BASE}. "),
        (append(f"{GRAPH}{bake.ORIGINAL}"), "00011", f"the originals of {GRAPH} are missing or changed"),
        (lambda tree: os.replace(f"{tree / GRAPH}{bake.ORIGINAL}", tree / GRAPH), "11000", HALF.format(3)),
        (install_over("2.12.0", TEXT), "11000", HALF.format(1)),
        (install_over("2.14.0", f"# new\n{TEXT}"), "11000", HALF.format(1)),
        (
            manifest_with({"version": "0.0.9"}),
            "11000",
            "Replace its fixes:\n  te-graph-fixes bake|Not all needed fixes",
        ),
        (manifest_with({"fixes": {}}), "11000", "baked .* without this fix. Run `te-graph-fixes bake`|Not all needed"),
        (manifest_with({"another": 1}), "00000", ""),
        *((manifest_with(wrong), "11111", "is not a valid manifest") for wrong in INVALID),
    ],
)
def test_a_baked_te_that_has_changed(
    change: Callable[[Path], None], statuses: str, said: str, small: Path, tmp_path: Path, cli: Cli
) -> None:
    """Each command succeeds, or fails and changes nothing. An undo restores TE, or keeps a reinstalled TE."""
    assert cli("bake", "--source", small)[0] == 0
    change(small)
    for command, wanted in zip(COMMANDS, statuses, strict=True):
        tree = shutil.copytree(small, tmp_path / command)
        before = content(tree)
        status, out, err = cli(*command.split(), "--source", tree)
        assert (str(status), bool(re.search(said, out + err))) == (wanted, wanted == "1" or not said), command
        if status or command in COMMANDS[:2] or statuses[3:] == "11":
            assert content(tree) == before
            continue
        assert cli("bake", "--check", "--source", tree)[0] == int("undo" in command)
        assert "undo" in command or cli("bake", "--undo", "--source", tree)[0] == 0
        assert not list(tree.rglob("*te-graph-fixes*"))
        texts = {(tree / PYTORCH / name).read_text() for name in ("graph.py", "module/base.py", "quantization.py")}
        assert texts in ({TEXT}, {f"# new\n{TEXT}"})


@pytest.mark.parametrize("folder", ["", "pytorch/module", "pytorch/__pycache__"])
def test_links_that_lead_outside(folder: str, small: Path, tmp_path: Path, cli: Cli) -> None:
    """A bake writes no file outside TE, but TE's folder itself may be a link."""
    (tmp_path / "file").write_text("")
    (small / f"{GRAPH}{bake.NEW}").symlink_to(tmp_path / "file")
    (small / f"{GRAPH}{bake.ORIGINAL}").symlink_to(tmp_path / "file")
    linked, outside = small / "transformer_engine" / folder, tmp_path / "outside"
    shutil.copytree(linked, outside, symlinks=True)
    shutil.rmtree(linked)
    linked.symlink_to(outside)
    before = content(outside)
    status, _, err = cli("bake", "--source", small)
    assert (status, "leads outside TransformerEngine" in err) == ((1, True) if folder else (0, False))
    assert (content(outside) == before) == (status == 1)
    assert (tmp_path / "file").read_text() == ""


def test_a_source_that_is_not_recognized_fails_the_build(small: Path, tmp_path: Path, cli: Cli) -> None:
    (small / GRAPH).write_text(TEXT.replace("1", "one"))
    before = content(small)
    for arguments in ([], ["--overlay", tmp_path / "overlay"]):
        status, out, err = cli("bake", "--source", small, *arguments)
        assert (status, out) == (1, "")
        assert "Nothing was written, because these fixes cannot be applied:\n  replay-arguments: looked for" in err
        assert err.endswith(f"add it to {DISABLE}. To report the problem, run:\n  te-graph-fixes issue\n")
    assert content(small) == before


def test_a_bake_of_another_version_is_replaced(small: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the bake that replaces an older bake is killed, the next bake or undo finishes the work."""
    commands, before = commands_for(small), content(small)
    for at in itertools.count(1, 2):
        with monkeypatch.context() as other:
            other.delitem(CATALOGUE, "none-outputs")
            for module in (bake, manifest):
                other.setattr(module, "__version__", "0.0.9")
            assert main(commands[0]) == cli("bake", "--check", "--source", small)[0] == 0
        first, *_ = cli("status", "--source", small)[1].splitlines()
        assert first.endswith(": 1 may be there, but cannot be fixed, 2 baked by te-graph-fixes 0.0.9.")
        if in_child(lambda: main(commands[0]), at, signal.SIGKILL) == 0:
            break
        assert main(commands[at // 2 % 2]) in (0, 1)
        assert cli("bake", "--check", "--source", small)[0] == at // 2 % 2
        main(commands[1])
        assert content(small) == before
    assert at > 40


def test_a_bake_stays_if_it_cannot_be_replaced(small: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    (small / BASE).write_text(TEXT.replace("1", "one"))
    with monkeypatch.context() as other:
        other.delitem(CATALOGUE, "none-outputs")
        assert cli("bake", "--source", small)[0] == 0
    manifest_with({"version": "0.0.9"})(small)
    before = content(small)
    status, _, err = cli("bake", "--source", small)
    assert (status, "cannot be applied:\n  none-outputs: looked for" in err, content(small)) == (1, True, before)


ALL, OFF, REPLAY = ("", ""), ("off", ""), ("", "replay-arguments")


@pytest.mark.parametrize(
    ("at_bake", "later", "said"),
    [
        (ALL, OFF, r": they differ from the bake in none-outputs, replay-arguments, warmup-reset\."),
        (ALL, REPLAY, r": they differ from the bake in replay-arguments, warmup-reset\."),
        (("upstream", ""), ("upstream", ""), None),
        (REPLAY, REPLAY, None),
        (REPLAY, ALL, None),
        (REPLAY, ("replay-arguments", ""), r": they differ from the bake in none-outputs, replay-arguments\."),
    ],
)
def test_settings_do_not_change_a_bake(
    at_bake: tuple[str, str],
    later: tuple[str, str],
    said: str | None,
    small: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If later settings conflict with the settings of the bake, `status` warns and `bake` fails."""

    def run(settings: tuple[str, str], *command: str) -> tuple[int, str]:
        for name, value in zip((SWITCH, DISABLE), settings, strict=True):
            monkeypatch.setenv(name, value)
        status, out, err = cli(*command, "--source", small)
        return status, out + err

    problem = f"all 3 are disabled by {SWITCH}. Nothing was baked. To bake these fixes, unset {SWITCH}."
    assert problem in run(OFF, "bake")[1]
    assert (" disabled by TE_GRAPH_FIXES" in run(at_bake, "bake")[1]) == (at_bake != ALL)
    baked = content(small)
    status, out = run(later, "status")
    assert (status, "warning: " in out, " disabled in the bake." in out) == (0, said is not None, at_bake != ALL)
    assert said is None or re.search(f"no effect on baked fixes until `te-graph-fixes bake --undo`{said}", out)
    status, out = run(later, "bake")
    assert (status, "until `te-graph-fixes bake --undo`" in out) == (int(said is not None), said is not None)
    assert (run(later, "bake", "--check")[0], content(small)) == (0, baked)


def test_the_package_in_a_zip_makes_the_same_changes(tmp_path: Path, cli: Cli) -> None:
    archive = shutil.make_archive(str(tmp_path / "package"), "zip", ROOT, "te_graph_fixes")
    command = ["diff", "--source", str(source("2.12.0"))]
    done = python("-m", "te_graph_fixes", *command, path=archive, cwd=tmp_path)
    diffs = [re.sub('"version": ".*"', "", diff) for diff in (done.stdout, cli(*command)[1])]
    assert diffs[0] == diffs[1] != "", done.stderr


def test_a_te_in_the_current_folder_is_ignored(tmp_path: Path) -> None:
    """A TE in the current folder is found only if PYTHONPATH names the folder. An empty entry does not name it."""
    tree, here = copy_of(source("2.12.0"), tmp_path / "tree"), tmp_path / "here"
    (here / "transformer_engine" / "pytorch").mkdir(parents=True)
    for name in ("", "pytorch"):
        (here / "transformer_engine" / name / "__init__.py").write_text("open('executed', 'w')\n")
    module, script = "-mte_graph_fixes", "-cfrom te_graph_fixes.__main__ import main; main()"
    for start, path in ((module, tree), (script, f":{tree}"), (module, f"{ROOT}:::{tree}")):
        assert f"\nin {tree}/transformer_engine" in python(start, "status", cwd=here, path=path).stdout
        assert python(start, "bake", cwd=here, path=path).returncode == 0
    assert not (here / "executed").exists()
    for path in (here, "."):
        assert f"\nin {here}/transformer_engine" in python(module, "status", cwd=here, path=path).stdout


def test_a_lock_of_another_process(small: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another process has locked TE's folder, the command must wait for a minute, and name that process."""
    location, slept = small / "transformer_engine", list[float]()
    monkeypatch.setattr(bake, "time", SimpleNamespace(sleep=slept.append))
    held = os.open(location, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    status, _, err = cli("bake", "--undo", "--source", small)
    os.close(held)
    waiting, ended = err.splitlines()
    assert (status, waiting) == (1, f"te-graph-fixes: Waiting for process {os.getpid()}, which has locked {location}.")
    assert f" Nothing was changed, because process {os.getpid()} still has {location} locked. Try again" in ended
    assert 59 < sum(slept) < 61


@pytest.mark.parametrize("output", [">/dev/full", ">/dev/full 2>&1", ">&- 2>&-", "| false"])
def test_an_output_that_is_full_or_closed(output: str, tmp_path: Path) -> None:
    tree = copy_of(source("2.12.0"), tmp_path)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1" if "2>" in output else "", "PYTHONPATH": str(ROOT)}
    for option, wanted in (("", 0), ("--undo", 0), ("--undo", 1)):
        command = f"{sys.executable} -m te_graph_fixes bake {option} --source {tree}; echo $? >{tree}/status"
        subprocess.run(["bash", "-c", f"({command}) {output}"], env=environment, check=False, capture_output=True)
        assert (tree / "status").read_text() == f"{wanted}\n", option


def test_an_overlay(small: Path, tmp_path: Path, cli: Cli) -> None:
    before, folder = content(small), tmp_path / "overlay"
    status, out, _ = cli("bake", "--source", small, "--overlay", folder)
    assert (status, content(small)) == (0, before)
    mounts = [line.split() for line in out.splitlines()]
    assert {file for file, _ in mounts} == {str(path) for path in folder.rglob("*") if path.is_file()}
    assert "is not empty" in cli("bake", "--source", small, "--overlay", folder)[2]
    for file, path in mounts:
        assert Path(file).relative_to(folder) == Path(path).relative_to(small)
        shutil.copy(file, path)
    assert cli("bake", "--check", "--source", small)[0] == 0
    assert "To remove an overlay, remove its mounts" in cli("bake", "--undo", "--source", small)[2]


def test_a_bake_that_breaks_te_is_undone(small: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    pytorch = small / PYTORCH / "__init__.py"
    monkeypatch.syspath_prepend(small)
    monkeypatch.setenv("PYTHONPATH", f"{small}{os.pathsep}{ROOT}")
    for text, wanted, said in (
        ("import transformer_engine.nowhere", 0, "cannot be imported even without fixes: ModuleNotFoundError: No"),
        (
            f"import os; assert not os.path.exists({str(small / MANIFEST)!r}), 'no'",
            1,
            "with the fixes: AssertionError: no",
        ),
    ):
        pytorch.write_text(f"{text}\n")
        shutil.rmtree(pytorch.parent / "__pycache__", ignore_errors=True)
        before = content(small)
        status, _, err = cli("bake")
        assert (status, said in err) == (wanted, True)
        assert cli("bake", "--undo")[0] == int(status == 1)
        assert content(small) == before
