"""Test ``te-graph-fixes bake`` and its undo on copies of published TransformerEngines (TE)."""

from __future__ import annotations

import compileall
import errno
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
from types import SimpleNamespace
from typing import Any

import pytest

from te_graph_fixes import __version__, decision, manifest
from te_graph_fixes.commands import bake
from te_graph_fixes.commands.cli import main
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.source import Source
from te_graph_fixes.settings import DISABLE, SWITCH
from tests.support.child import ROOT, Cli, python
from tests.support.published import COVERED, RENAMED, altered, copy_of, needed, source

GRAPH = "transformer_engine/pytorch/graph.py"
ADDED = "transformer_engine/pytorch/_te_graph_order.py"
MISSING = "Not all needed fixes are baked. Run:\n  te-graph-fixes bake"
MANIFEST = f"transformer_engine/{manifest.NAME}"


def copy(folder: Path, version: str = "2.12.0") -> Path:
    """Return a site-packages folder with the Python files of a TE, some of them compiled."""
    copy_of(source(version), folder)
    for name in ("graph.py", "__init__.py", "module/base.py"):
        py_compile.compile(str(folder / "transformer_engine" / "pytorch" / name))
    return folder


def content(tree: Path) -> dict[str, tuple[int, int, str | None]]:
    """Return permissions, time and content of every file in a tree, except bytecode."""
    return {
        str(path.relative_to(tree)): (path.lstat().st_mode, path.lstat().st_mtime_ns, manifest.file_digest(path))
        for path in tree.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def modules(tree: Path) -> dict[str, str | None]:
    return {name: found for name, (*_, found) in content(tree).items() if name.endswith(".py") and "/." not in name}


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = copy(tmp_path_factory.mktemp("baked"))
    assert main(["bake", "--source", str(tree)]) == 0
    return tree


@pytest.fixture
def tree(baked: Path, tmp_path: Path) -> Path:
    """Return a copy of the baked TE."""
    return shutil.copytree(baked, tmp_path / "tree")


@pytest.mark.parametrize("version", ["2.10.0", COVERED[-1]])
def test_a_bake_and_its_undo(version: str, tmp_path: Path, cli: Cli) -> None:
    tree = copy(tmp_path, version)
    before = content(tree)
    targets = {name for verdict in needed(version).values() for name in verdict.targets}
    expected = {bake.module_path(Source.at(tree), name) for name in targets}
    status, out, _ = cli("bake", "--check", "--source", tree)
    assert (status, out.partition("\n")[2]) == (1, f"{MISSING} --source {tree}\n")
    assert content(tree) == before
    status, out, _ = cli("bake", "--source", tree)
    assert status == 0
    said = f"Baked {len(needed(version))} fixes into TransformerEngine {version} ({len(expected)} modules in "
    assert out == f"{said}{tree}/transformer_engine). Undo:\n  te-graph-fixes bake --undo --source {tree}\n"
    was = {name: digest for name, (*_, digest) in before.items()}
    assert {name for name, digest in modules(tree).items() if was.get(name) != digest} == expected
    assert not list((tree / GRAPH).parent.glob("__pycache__/graph.*.pyc"))

    baked = content(tree)
    for command in ("status", "bake --check", "bake"):
        status, out, _ = cli(*command.split(), "--source", tree)
        assert (status, f" are baked by te-graph-fixes {__version__}." in out.splitlines()[0]) == (0, True)
    assert cli("diff", "--source", tree)[:2] == (0, "")
    assert content(tree) == baked
    done = f"Undid the bake of te-graph-fixes {__version__}: {len(expected)} modules restored or deleted in "
    assert cli("bake", "--undo", "--source", tree)[:2] == (0, f"{done}{tree}/transformer_engine\n")
    assert content(tree) == before
    assert cli("bake", "--undo", "--source", tree)[0] == 1


def test_a_bake_is_what_diff_and_patch_make(baked: Path, tmp_path: Path, cli: Cli) -> None:
    patched = copy(tmp_path)
    out = cli("diff", "--source", patched)[1]
    subprocess.run(["patch", "-p1", "--fuzz=0"], input=out, text=True, cwd=patched, check=True, capture_output=True)
    assert modules(patched) == modules(baked)
    assert (patched / MANIFEST).read_text() == (baked / MANIFEST).read_text()
    assert cli("bake", "--check", "--source", patched)[0] == 0
    status, _, err = cli("bake", "--undo", "--source", patched)
    assert (status, "To revert a patch, use `patch -p1 -R`" in err) == (1, True)


def test_permissions_owners_and_links_stay(tmp_path: Path) -> None:
    """A link is replaced by a file, so that its target does not change for other users."""
    tree, owner = copy(tmp_path / "tree"), 1234 if os.getuid() == 0 else os.getuid()
    graph, quantization = tree / GRAPH, tree / "transformer_engine/pytorch/quantization.py"
    for path in tree.rglob("*"):
        os.chown(path, owner, os.getgid())
    graph.chmod(0o440)
    real, shared = tmp_path / "real.py", tmp_path / "shared.py"
    os.rename(quantization, real)
    quantization.symlink_to(real)
    os.link(tree / "transformer_engine/pytorch/module/base.py", shared)
    before = content(tree), real.read_bytes(), shared.read_bytes()

    def bake_with_umask() -> None:
        os.umask(0o077)
        assert main(["bake", "--source", str(tree)]) == 0

    assert in_child(bake_with_umask) == 0
    files = {path.stat() for path in tree.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert {(stat.st_mode & 0o777, stat.st_uid) for stat in files} == {(0o644, owner), (0o440, owner)}
    assert graph.stat().st_mode & 0o777 == 0o440
    assert not quantization.is_symlink()
    assert (real.read_bytes(), shared.read_bytes()) == before[1:]
    assert main(["bake", "--undo", "--source", str(tree)]) == 0
    assert (content(tree), real.read_bytes(), shared.read_bytes()) == before
    assert quantization.readlink() == real
    assert {path.lstat().st_uid for path in tree.rglob("*.py") if not path.is_symlink()} == {owner}


WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.chown"}


def in_child(work: Callable[[], object], at: int = 0, signal_number: int = signal.SIGKILL) -> int:
    """Call ``work`` in a fork, and stop it at one of its writes, counted from 1. Return how the fork ended.

    Instead of a signal, 0 is a full disk.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status: object = 99
    try:
        writes = itertools.count(1)

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if (opened or event in WRITES) and next(writes) == at:
                if signal_number == 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")
                os.kill(os.getpid(), signal_number)

        signal.signal(signal.SIGINT, signal.default_int_handler)  # the shell that started the tests may ignore both
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        sys.addaudithook(hook)
        status = work() or 0
    finally:
        os._exit(status if isinstance(status, int) else 0)


def code(tree: Path, names: Iterable[str]) -> list[Any]:
    """Return the code that Python would run for each module, from its bytecode or text; None for a missing module."""
    return [SourceFileLoader("m", str(tree / name)).get_code("m") if (tree / name).exists() else None for name in names]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A TE with one bug, whose fix changes one module and adds one. Its bytecode is used without a look at its text."""
    compileall.compile_dir(copy(tmp_path), quiet=1, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    monkeypatch.setattr(decision, "CATALOGUE", {"parameter-hooks": CATALOGUE["parameter-hooks"]})
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


SMALL = ["transformer_engine/pytorch/_te_parameter_hooks.py", GRAPH]


def test_killed_at_any_write(small: Path, cli: Cli) -> None:
    """The first modules are baked, and the others unchanged. The next command, which is not killed, succeeds."""
    commands = [["bake", "--source", str(small)], ["bake", "--undo", "--source", str(small)]]
    before, original = content(small), code(small, SMALL)
    assert main(commands[0]) == 0
    baked, counts = code(small, SMALL), set()
    for undoes in (True, False):
        for number in itertools.count(1):
            main(commands[not undoes])
            if in_child(lambda: main(commands[undoes]), number) == 0:  # noqa: B023
                break
            counts |= {
                *re.findall(
                    r"interrupted or is running, .*: (\d) of 2 modules", said := cli("status", *commands[0][1:])[1]
                )
            }
            found = code(small, SMALL)
            assert found == (original if "can be fixed" in said else baked) or "interrupted" in said
            assert found in (original, [baked[0], original[1]], baked)
            if number % 3 == 0:
                in_child(lambda: main(commands[0]), number % 13 + 1)
                assert code(small, SMALL) in (original, [baked[0], original[1]], baked)
            main(commands[number % 2])
            assert code(small, SMALL) == (baked, original)[number % 2], number
    assert counts == {"0", "1"}
    main(commands[1])
    assert content(small) == before


@pytest.mark.parametrize("number", [0, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_error_or_a_signal_at_a_write(number: int, small: Path) -> None:
    """A bake restores the originals. An undo continues to its end after a signal; after an error, the next one does."""
    commands = [["bake", "--source", str(small)], ["bake", "--undo", "--source", str(small)]]
    before = content(small)
    for undoes in (False, True):
        statuses = set()
        for at in range(2, 50, 5):
            if undoes:
                assert main(commands[0]) == 0
            statuses.add(status := in_child(lambda: main(commands[undoes]), at, number))  # noqa: B023
            if status == (0, 1)[undoes]:
                assert main(commands[1]) == 0
            assert content(small) == before, at
        assert statuses == {0, 130 if number else 1}
    ignoring = lambda: (signal.signal(signal.SIGHUP, signal.SIG_IGN), main(commands[0]))[1]  # noqa: E731 - as `nohup`
    assert in_child(ignoring, 17, signal.SIGHUP) == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root may do this")
@pytest.mark.parametrize(("lock", "unlock"), [("chattr +i", "chattr -i"), ("mount --bind {}", "umount")])
def test_a_file_that_is_immutable_or_mounted(lock: str, unlock: str, tmp_path: Path, cli: Cli) -> None:
    """The error names it. A bake changes nothing, and an undo ends once the file can be replaced."""
    tree, before = copy(tmp_path), content(tmp_path)
    base = tree / "transformer_engine/pytorch/module/base.py"
    for option in ([], ["--undo"]):
        if subprocess.run([*lock.format(base).split(), base], capture_output=True, check=False).returncode:
            pytest.skip(f"`{lock}` is not permitted here")
        status, _, err = cli("bake", *option, "--source", tree)
        subprocess.run([*unlock.split(), base], check=True)
        assert (status, f"Cannot write {base}: " in err) == (1, True)
        assert ("interrupted" in cli("status", "--source", tree)[1]) == (option != [])
        assert option or content(tree) == before
        assert cli("bake", *option, "--source", tree)[0] == 0
    assert content(tree) == before


def test_a_site_packages_that_cannot_be_written(tree: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for path in (*tree.rglob("*"), tree):
        path.chmod(0o555 if path.is_dir() else 0o444)
    for folder in tree.parents:
        if folder.stat().st_uid == os.getuid():
            folder.chmod(folder.stat().st_mode | 0o055)
    before = content(tree)

    def as_somebody_else() -> int:
        if os.getuid() == 0:
            os.setuid(65534)
        return main(["bake", "--undo", "--source", str(tree)]) + main(["bake", "--check", "--source", str(tree)])

    assert in_child(as_somebody_else) == 1
    assert re.search(r"Cannot write .*graph.py: Permission denied\. Check TE with ", capfd.readouterr().err)
    assert content(tree) == before
    for path in (*tree.rglob("*"), tree):
        path.chmod(0o755)


def test_a_source_that_is_not_recognized_fails_the_build(tmp_path: Path, cli: Cli) -> None:
    tree = altered(tmp_path, "2.12.0", *RENAMED)
    before = content(tree)
    for arguments in ([], ["--overlay", tmp_path / "overlay"]):
        status, out, err = cli("bake", "--source", tree, *arguments)
        assert (status, out) == (1, "")
        assert "Nothing was written, because these fixes cannot be applied:\n  backward-amax-red" in err
        assert err.endswith(f"add it to {DISABLE}. To report the problem, run:\n  te-graph-fixes issue\n")
    assert content(tree) == before


def release(patch: pytest.MonkeyPatch, version: str, *unknown: str) -> None:
    """Replace the package by another release: its version, without fixes that it lacks."""
    for module in (bake, manifest):
        patch.setattr(module, "__version__", version)
    known = {fix_id: fix for fix_id, fix in CATALOGUE.items() if fix_id not in unknown}
    patch.setattr(decision, "CATALOGUE", known)


@pytest.mark.parametrize(("version", "unknown"), [("0.0.9", ["wgrad-hook-order"]), ("0.2.0", [])])
def test_a_bake_of_another_version_is_replaced(
    version: str, unknown: list[str], tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = copy(tmp_path)
    before = content(tree)
    with monkeypatch.context() as other:
        release(other, version, *unknown)
        assert cli("bake", "--source", tree)[0] == 0
        assert cli("bake", "--check", "--source", tree)[0] == 0
    status, out, _ = cli("status", "--source", tree)
    count, total = len(needed("2.12.0")) - len(unknown), len(needed("2.12.0"))
    outcome = f"; all {count} are baked" if not unknown else f": 1 may be there, but cannot be fixed, {count} baked"
    said = f"{total} of the {len(CATALOGUE)} known bugs{outcome} by te-graph-fixes {version}."
    assert out.splitlines()[0] == f"TransformerEngine 2.12.0 had {said}"
    assert out.endswith(f"Replace its fixes:\n  te-graph-fixes bake --source {tree}\n")
    assert status == cli("bake", "--check", "--source", tree)[0] == 1
    assert json.loads(cli("status", "--json", "--source", tree)[1])["outdated"]
    for number in (40, 300):
        assert in_child(lambda: main(["bake", "--source", str(tree)]), number) == -signal.SIGKILL
        assert cli("bake", "--check", "--source", tree)[0] == 1
    status, _, err = cli("bake", "--source", tree)
    assert (status, "Undid the bake of te-graph-fixes " in err) == (0, True)
    assert cli("bake", "--check", "--source", tree)[0] == 0
    assert cli("bake", "--undo", "--source", tree)[0] == 0
    assert content(tree) == before


def test_fixes_that_a_bake_disabled_are_known(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = copy(tmp_path)
    before = content(tree)
    monkeypatch.setenv(SWITCH, "off")
    status, _, err = cli("bake", "--source", tree)
    assert (status, content(tree) == before) == (1, True)
    said = rf"\d+ of the \d+ known bugs; all \d+ are disabled by {SWITCH}. Nothing to bake: unset {SWITCH}."
    assert re.match(f"te-graph-fixes: TransformerEngine 2.12.0 has {said}", err)
    monkeypatch.delenv(SWITCH)
    monkeypatch.setenv(DISABLE, "replay-arguments")
    out = cli("bake", "--source", tree)[1]
    assert f", 1 disabled by {DISABLE}). Undo:\n  te-graph-fixes bake --undo --source {tree}\n" in out
    for setting in ("replay-arguments", ""):
        monkeypatch.setenv(DISABLE, setting)
        for command in ("status", "bake", "bake --check"):
            status, out, _ = cli(*command.split(), "--source", tree)
            assert (status, ", 1 disabled in the bake." in out) == (0, True)
    assert "\nreplay preconditions: disabled in the bake\n  replay-arguments " in cli("status", "--source", tree)[1]
    monkeypatch.setenv(SWITCH, "replay-arguments,none-outputs")
    status, _, err = cli("bake", "--source", tree)
    said = "until `te-graph-fixes bake --undo`: [0-9]+ fixes stay applied and replay-arguments stay disabled"
    assert (status, re.search(said, err) is not None) == (1, True)


@pytest.mark.parametrize("setting", [f"{SWITCH}=upstream", f"{DISABLE}=grouped-linear-skip-flag"])
def test_a_bake_agrees_with_settings(setting: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = copy(tmp_path)
    monkeypatch.setenv(*setting.split("="))
    assert cli("bake", "--source", tree)[0] == cli("bake", "--source", tree)[0] == 0
    assert "warning" not in cli("status", "--source", tree)[1]


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        (SWITCH, "off", r": \d+ fixes stay applied\.$"),
        (DISABLE, "param-grad-lifetime", ": delayed-.*, param-.*, warmup-reset stay applied\\.$"),
        (DISABLE, "tuple-samples", None),
    ],
)
def test_settings_change_nothing_on_disk_and_that_is_said(
    variable: str, value: str, said: str | None, baked: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = cli("status", "--source", baked)[1].splitlines()
    monkeypatch.setenv(variable, value)
    status, out, _ = cli("status", "--source", baked)
    warned = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert (status, [line for line in out.splitlines() if line not in warned]) == (0, plain)
    assert len(warned) == (said is not None)
    assert said is None or re.search(said, warned[0])
    status, _, err = cli("bake", "--source", baked)
    assert (status, "until `te-graph-fixes bake --undo`" in err) == ((0, False) if said is None else (1, True))


def test_a_manifest_with_other_keys_or_fixes(tree: Path, cli: Cli) -> None:
    """A newer version may have added a key. Missing fixes are baked."""
    data, statuses = json.loads((tree / MANIFEST).read_text()), []
    for changed in ({"another": 1}, {"fixes": {}}):
        (tree / MANIFEST).write_text(json.dumps({**data, **changed}))
        statuses += [cli("bake", *option, "--source", tree)[0] for option in (["--check"], [], ["--check"])]
    assert statuses == [0, 0, 0, 1, 0, 0]


def test_the_package_in_a_zip_makes_the_same_changes(tmp_path: Path, cli: Cli) -> None:
    archive = shutil.make_archive(str(tmp_path / "package"), "zip", ROOT, "te_graph_fixes")
    command = ["diff", "--source", str(source("2.12.0"))]
    done = python("-m", "te_graph_fixes", *command, path=archive, cwd=tmp_path)
    diffs = [re.sub('"version": ".*"', "", diff) for diff in (done.stdout, cli(*command)[1])]
    assert diffs[0] == diffs[1] != "", done.stderr


@pytest.mark.parametrize("name", [GRAPH, ADDED, f"{GRAPH}{bake.ORIGINAL}"])
def test_a_later_edit_is_said(name: str, tree: Path, cli: Cli) -> None:
    """It is not mistaken for a new installation, even if TE has another version. A changed copy is not restored."""
    (tree / name).write_text((tree / name).read_text() + "X = 1\n")
    metadata = next(tree.glob("*.dist-info/METADATA"))
    metadata.write_text(metadata.read_text().replace("Version: 2.12.0", "Version: 2.12.0+local"))
    before, is_module = content(tree), name.endswith(".py")
    for command in ("status", "bake", "bake --check", "bake --undo") if is_module else ("bake --undo --force",):
        status, out, err = cli(*command.split(), "--source", tree)
        assert (status, name.removesuffix(bake.ORIGINAL) in out + err) == (1, True)
        assert ("discard it with `te-graph-fixes bake --undo --force`" in out + err) == is_module
    assert content(tree) == before
    assert cli("bake", "--undo", "--force", "--source", tree)[0] == (0 if is_module else 1)
    assert not is_module or modules(tree).items() <= modules(source("2.12.0")).items()
    assert cli("bake", "--force", "--source", tree)[0] == 2


ZEROS, ONES = "0" * 64, "1" * 64
INVALID = (
    *("", "null", "[" * 99999, "{}", '{"files": {}}', {"files": {}}, {"files": None}, {"fixes": None}, {"code": []}),
    *(
        {"fixes": {"warmup-reset": {}}},
        {"version": 1},
        {"version": "\ud800"},
        {"te_version": []},
        {"code": {"x": None}},
    ),
    *({"code": {"x": {place: "1"}}} for place in ("os:system", "transformer_engine.x", "transformer_engine.x:y\n")),
    *({"files": {GRAPH: each}} for each in (None, [], ["0", "1"], [None, ZEROS], ["", ZEROS], [ZEROS, None], [1, 2])),
    *({"files": {path: [ZEROS, ONES]}} for path in ("graph.py", "/etc/passwd", "transformer_engine/../x.py", "")),
    *({"files": {path: [ZEROS, ONES]}} for path in ("transformer_engine/\ud800.py", f"{GRAPH}\n")),
)


@pytest.mark.parametrize("wrong", INVALID)
def test_an_invalid_manifest(wrong: str | dict[str, Any], tree: Path, cli: Cli) -> None:
    data = json.loads((tree / MANIFEST).read_text())
    (tree / MANIFEST).write_text(wrong if isinstance(wrong, str) else json.dumps({**data, **wrong}))
    before = content(tree)
    for command in ("bake", "bake --check", "bake --undo --force", "status"):
        status, out, err = cli(*command.split(), "--source", tree)
        assert (status, "is not a valid manifest" in out + err) == (1, True)
    assert content(tree) == before


@pytest.mark.parametrize("folder", ["", "pytorch/module", "pytorch/__pycache__"])
def test_links_that_lead_outside(folder: str, tmp_path: Path, cli: Cli) -> None:
    """No file outside TE is written. A link to TE's folder is allowed."""
    tree, outside = copy(tmp_path / "tree"), tmp_path / "outside"
    (tmp_path / "file").write_text("")
    (tree / f"{GRAPH}{bake.NEW}").symlink_to(tmp_path / "file")
    (tree / f"{GRAPH}{bake.ORIGINAL}").symlink_to(tmp_path / "file")
    linked = tree / "transformer_engine" / folder
    shutil.copytree(linked, outside, symlinks=True)
    shutil.rmtree(linked)
    linked.symlink_to(outside)
    before = content(outside)
    status, _, err = cli("bake", "--source", tree)
    assert (status, "leads outside TransformerEngine" in err) == ((1, True) if folder else (0, False))
    assert (content(outside) == before) == (status == 1)
    assert (tmp_path / "file").read_text() == ""


def test_a_te_in_the_current_folder_is_ignored(tmp_path: Path) -> None:
    """Unless PYTHONPATH names the folder. An empty entry names none."""
    tree, here = copy(tmp_path / "tree"), tmp_path / "here"
    (here / "transformer_engine" / "pytorch").mkdir(parents=True)
    for name in ("", "pytorch"):
        (here / "transformer_engine" / name / "__init__.py").write_text("open('executed', 'w')\n")
    for module in ("-mte_graph_fixes", "-cfrom te_graph_fixes.__main__ import main; main()"):
        for path in (tree, f":{tree}", f"{ROOT}:::{tree}"):
            assert f"{tree}/transformer_engine" in python(module, "status", cwd=here, path=path).stdout
            assert python(module, "bake", cwd=here, path=path).returncode == 0
            assert not (here / "executed").exists()
    for path in (here, "."):
        found = python("-m", "te_graph_fixes", "status", cwd=here, path=path).stdout
        assert f"\nin {here}/transformer_engine" in found


def test_a_lock_of_another_process(tree: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command waits for a minute, and names the other process."""
    location, slept = tree / "transformer_engine", list[float]()
    monkeypatch.setattr(bake, "time", SimpleNamespace(sleep=slept.append))
    program = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", program, location]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        status, _, err = cli("bake", "--undo", "--source", tree)
        other.kill()
    waiting, ended = err.splitlines()
    assert (status, waiting) == (1, f"te-graph-fixes: Waiting for process {other.pid}, which has locked {location}.")
    assert f" Nothing was changed, because process {other.pid} still has {location} locked. Try again" in ended
    assert 59 < sum(slept) < 61


@pytest.mark.parametrize("output", [">/dev/full", ">/dev/full 2>&1", ">&- 2>&-", "| false"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_is_full_or_closed(output: str, unbuffered: str, tmp_path: Path) -> None:
    tree = copy(tmp_path)
    command = f"{sys.executable} -m te_graph_fixes bake --source {tree}"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered, "PYTHONPATH": str(ROOT)}
    for option, wanted in ((f"--overlay {tree}/new", 0), ("", 0), ("--check", 0), ("--undo", 0), ("--undo", 1)):
        shell = ["bash", "-c", f"({command} {option}; echo $? >{tree}/status) {output}"]
        subprocess.run(shell, env=environment, check=False, capture_output=True)
        assert (tree / "status").read_text() == f"{wanted}\n", option


@pytest.mark.parametrize("version", ["2.14.0", "2.12.0"])
@pytest.mark.parametrize("command", ["bake", "bake --undo --force"])
def test_a_te_that_was_installed_over_a_bake(version: str, command: str, tree: Path, tmp_path: Path, cli: Cli) -> None:
    for name in (*modules(source("2.12.0")), "transformer_engine-2.12.0.dist-info/METADATA"):  # as pip deletes it
        (tree / name).unlink(missing_ok=True)
    copy_of(source(version), tree)
    new = modules(copy_of(source(version), tmp_path / "new"))
    status, out, _ = cli("status", "--source", tree)
    assert status == cli("bake", "--check", "--source", tree)[0] == 1
    assert "or TransformerEngine was reinstalled: " in out
    status, out, err = cli(*command.split(), "--source", tree)
    assert (status, f"Undid the bake of te-graph-fixes {__version__}: " in out + err) == (0, True)
    assert cli("bake", "--check", "--source", tree)[0] == int(command != "bake")
    if command == "bake":
        assert cli("bake", "--undo", "--source", tree)[0] == 0
    assert modules(tree) == new


def test_an_overlay(tmp_path: Path, cli: Cli) -> None:
    tree, folder = copy(tmp_path / "image"), tmp_path / "overlay"
    before = content(tree)
    status, out, _ = cli("bake", "--source", tree, "--overlay", folder)
    assert status == 0
    assert content(tree) == before
    mounts = [line.split() for line in out.splitlines()]
    assert {file for file, _ in mounts} == {str(path) for path in folder.rglob("*") if path.is_file()}
    for file, path in mounts:
        assert Path(file).relative_to(folder) == Path(path).relative_to(tree)
        shutil.copy(file, path)
    assert cli("bake", "--check", "--source", tree)[0] == 0
    assert "is not empty" in cli("bake", "--source", source("2.12.0"), "--overlay", folder)[2]


def test_a_bake_that_breaks_te_is_undone(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """TE is a stand-in here that imports none of its modules, and fails if it is fixed."""
    tree = copy(tmp_path)
    for name in ("", "pytorch", "pytorch/module"):
        (tree / "transformer_engine" / name / "__init__.py").write_text("")
    pytorch = tree / "transformer_engine/pytorch/__init__.py"
    monkeypatch.syspath_prepend(tree)
    monkeypatch.setenv("PYTHONPATH", f"{tree}{os.pathsep}{ROOT}")
    pytorch.write_text("import transformer_engine.nowhere\n")
    status, _, err = cli("bake")
    assert (status, "cannot be imported even without fixes: ModuleNotFoundError: No module" in err) == (0, True)
    assert cli("bake", "--undo")[0] == 0
    pytorch.write_text(f"import os\nassert not os.path.exists({str(tree / MANIFEST)!r}), 'corrected'\n")
    before = content(tree)
    status, _, err = cli("bake")
    assert (status, "TransformerEngine cannot be imported baked: AssertionError: corrected" in err) == (1, True)
    assert content(tree) == before
