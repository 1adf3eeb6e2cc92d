"""Test ``te-graph-fixes bake`` and its undo on copies of published TransformerEngines (TE)."""

from __future__ import annotations

import compileall
import errno
import hashlib
import itertools
import json
import os
import platform
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
from te_graph_fixes.decision import Decision, decide, read
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.source import Source
from te_graph_fixes.settings import DISABLE, SWITCH, Settings
from te_graph_fixes.status import Status
from tests.support.child import ROOT, Cli, python
from tests.support.published import COVERED, RENAMED, altered, copy_of, needed, source

GRAPH = "transformer_engine/pytorch/graph.py"
ADDED = "transformer_engine/pytorch/_te_graph_order.py"
MANIFEST = f"transformer_engine/{manifest.NAME}"


def copy(folder: Path, version: str = "2.12.0") -> Path:
    """Return a site-packages folder with the Python files of a TE, some of them compiled."""
    copy_of(source(version), folder)
    for name in ("graph.py", "__init__.py", "module/base.py"):
        py_compile.compile(str(folder / "transformer_engine" / "pytorch" / name))
    return folder


def content(tree: Path) -> dict[str, tuple[int, int, str]]:
    """Return permissions, time and content of every file in a tree, except bytecode."""
    return {
        str(path.relative_to(tree)): (path.lstat().st_mode, path.lstat().st_mtime_ns, digest(path))
        for path in tree.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def modules(tree: Path) -> dict[str, str]:
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
    advice = ["Not all needed fixes are baked. Run:", f"  te-graph-fixes bake --source {tree}"]
    assert (status, out.splitlines()[1:]) == (1, advice)
    assert content(tree) == before
    status, out, _ = cli("bake", "--source", tree)
    assert status == 0
    assert out.startswith(
        f"Baked {len(needed(version))} fixes into TransformerEngine {version} ({len(expected)} modules "
    )
    assert out.endswith(f" Undo:\n  te-graph-fixes bake --undo --source {tree}\n")
    was = {name: digest for name, (*_, digest) in before.items()}
    assert {name for name, digest in modules(tree).items() if was.get(name) != digest} == expected
    assert not list((tree / GRAPH).parent.glob("__pycache__/graph.*.pyc"))

    reasons = {fix: verdict.reason for fix, verdict in read(Source.at(tree)).verdicts.items()}
    assert {fix for fix, reason in reasons.items() if "baked by" in reason} == set(needed(version))
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


def test_permissions_and_links_stay(tmp_path: Path) -> None:
    """A link is replaced by a file, so that its target does not change for other users."""
    tree = copy(tmp_path / "tree")
    graph, quantization = tree / GRAPH, tree / "transformer_engine/pytorch/quantization.py"
    graph.chmod(0o440)
    real, shared = tmp_path / "real.py", tmp_path / "shared.py"
    os.rename(quantization, real)
    quantization.symlink_to(real)
    os.link(tree / "transformer_engine/pytorch/module/base.py", shared)
    before = content(tree), real.read_bytes(), shared.read_bytes()
    assert main(["bake", "--source", str(tree)]) == 0
    assert graph.stat().st_mode & 0o777 == 0o440
    assert not quantization.is_symlink()
    assert (real.read_bytes(), shared.read_bytes()) == before[1:]
    assert main(["bake", "--undo", "--source", str(tree)]) == 0
    assert (content(tree), real.read_bytes(), shared.read_bytes()) == before
    assert quantization.readlink() == real


WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.chown"}


def in_child(work: Callable[[], object], kill_at: int = 0) -> int:
    """Call ``work`` in a fork that is killed at a write, counted from 1. Return its status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        writes = itertools.count(1)

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if (opened or event in WRITES) and next(writes) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        work()
        status = 0
    finally:
        os._exit(status)


def small(folder: Path) -> Decision:
    """Return the decision for one fix, which changes one module and adds one.

    Python uses TE's bytecode without reading its text.
    """
    compileall.compile_dir(copy(folder), quiet=1, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    return decide(read(Source.at(folder)), Settings(frozenset({"rng-states-at-replay"})))


def code(tree: Path, names: Iterable[str]) -> list[Any]:
    """Return the code that Python would run for each module, from its bytecode or text; None for a missing module."""
    return [SourceFileLoader("m", str(tree / name)).get_code("m") if (tree / name).exists() else None for name in names]


def test_killed_at_any_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first modules are baked, and the others unchanged. The next command, which is not killed, succeeds."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    decided = small(tmp_path)
    *names, _ = files = bake.baked_files(decided)
    before, original = content(tmp_path), code(tmp_path, names)

    def undo_it() -> None:
        bake.undo(decided.source)

    def bake_it() -> None:
        undo_it()
        bake.write_in_place(decided.source, files)

    bake_it()
    baked, reasons = code(tmp_path, names), set()
    prefixes = [original, [baked[0], original[1]], baked]
    for work, undone in ((undo_it, bake_it), (bake_it, undo_it)):
        for number in itertools.count(1):
            undone()
            if in_child(work, number) == 0:
                break
            reason = read(Source.at(tmp_path)).verdicts["rng-states-at-replay"].reason
            reasons.add(reason)
            is_whole = "was interrupted, or is running" not in reason
            assert code(tmp_path, names) in ([baked if "baked by" in reason else original] if is_whole else prefixes)
            in_child(bake_it, number % 13 + 1)
            assert code(tmp_path, names) in prefixes
            following, wanted = ((bake_it, baked), (undo_it, original))[number % 2]
            following()
            assert code(tmp_path, names) == wanted, number
    assert {match[0] for match in (re.search("[01] of 2 modules", reason) for reason in reasons) if match} == {
        "0 of 2 modules",
        "1 of 2 modules",
    }
    undo_it()
    assert content(tmp_path) == before


REPLACE = os.replace


def at_rename(patch: pytest.MonkeyPatch, name: str, action: Callable[[str, Path], object]) -> None:
    """Call ``action`` before a file is renamed to ``name``."""
    patch.setattr(os, "replace", lambda new, old: (old.name == name and action(new, old), REPLACE(new, old)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_within_the_renames(number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bake restores the originals, and an undo continues to its end."""
    decided = small(tmp_path)
    files, before = bake.baked_files(decided), content(tmp_path)
    for name in (manifest.NAME, "_te_rng_states_at_replay.py", "graph.py"):
        at_rename(monkeypatch, name, lambda *_: os.kill(os.getpid(), number))
        assert in_child(lambda: bake.write_in_place(decided.source, files)) != 0
        assert content(tmp_path) == before
    monkeypatch.setattr(os, "replace", REPLACE)
    bake.write_in_place(decided.source, files)
    at_rename(monkeypatch, "graph.py", lambda *_: os.kill(os.getpid(), number))
    assert in_child(lambda: bake.undo(decided.source)) != 0
    assert content(tmp_path) == before


@pytest.mark.parametrize("error", [errno.EBUSY, errno.EPERM, errno.ENOSPC])
def test_a_file_that_cannot_be_replaced(error: int, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file may be mounted, immutable, or on a full disk. The error names it, and TE does not change."""

    def refuse(new: str, old: Path) -> None:
        raise OSError(error, os.strerror(error), new, None, old)

    tree, before = copy(tmp_path), content(tmp_path)
    for name in (manifest.NAME, "_te_graph_order.py", "base.py", "graph.py"):
        at_rename(monkeypatch, name, refuse)
        status, out, err = cli("bake", "--source", tree)
        assert (status, out, f"/{name}: {os.strerror(error)}. " in err) == (1, "", True)
        assert content(tree) == before
    monkeypatch.setattr(os, "replace", REPLACE)
    assert cli("bake", "--source", tree)[0] == 0
    at_rename(monkeypatch, "base.py", refuse)
    status, _, err = cli("bake", "--undo", "--source", tree)
    assert (status, "base.py: " in err, "the fixes are in some of its modules" in err) == (1, True, True)
    assert "is running: " in cli("status", "--source", tree)[1]
    monkeypatch.setattr(os, "replace", REPLACE)
    assert cli("bake", "--undo", "--source", tree)[0] == 0
    assert content(tree) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root may do this")
@pytest.mark.parametrize(("lock", "unlock"), [("chattr +i", "chattr -i"), ("mount --bind {}", "umount")])
def test_a_file_that_is_immutable_or_mounted(lock: str, unlock: str, tmp_path: Path, cli: Cli) -> None:
    tree, before = copy(tmp_path), content(tmp_path)
    base = tree / "transformer_engine/pytorch/module/base.py"
    if subprocess.run([*lock.format(base).split(), base], capture_output=True, check=False).returncode:
        pytest.skip(f"`{lock}` is not permitted here")
    status, _, err = cli("bake", "--source", tree)
    changed = content(tree) != before
    subprocess.run([*unlock.split(), base], check=True)
    assert (status, f"Cannot write {base}: " in err, changed) == (1, True, False)


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
    statuses.append(main(["bake", "--source", str(tree)]))
    if statuses[-1] == 0:
        break
    assert content(tree) == before, free
space = os.statvfs(disk)
os.posix_fallocate(os.open(disk / "rest", os.O_WRONLY | os.O_CREAT), 0, space.f_bavail * space.f_frsize or 1)
assert main(["bake", "--undo", "--source", str(tree)]) == 0
assert content(tree) == before
print(set(statuses), len(statuses))
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """With any amount of free space, a bake changes all modules or none. The undo needs no space."""
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", FULL_DISK]
    done = subprocess.run([*command, tmp_path, source("2.12.0")], cwd=ROOT, capture_output=True, text=True, check=False)
    if "unshare: unshare failed" in done.stderr:
        pytest.skip("this machine lets nobody mount")
    assert (done.returncode, done.stdout.splitlines()[-1][:6]) == (0, "{0, 1}"), done.stdout + done.stderr


def test_a_site_packages_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tree = copy(tmp_path)
    paths = (*tree.rglob("*"), tree)
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    for folder in tmp_path.parents:
        if folder.stat().st_uid == os.getuid():
            folder.chmod(folder.stat().st_mode | 0o055)
    before = content(tree)

    def as_somebody_else() -> None:
        if os.getuid() == 0:
            os.setuid(65534)
        os._exit(main(["bake", "--source", str(tree)]))

    assert in_child(as_somebody_else) == 1
    said = r"te-graph-fixes: Cannot write .*: Permission denied\. .* with `te-graph-fixes bake --overlay DIR`\.\n"
    assert re.fullmatch(said, capfd.readouterr().err)
    assert content(tree) == before
    for path in paths:
        path.chmod(0o755)


def test_a_source_that_is_not_recognized_fails_the_build(tmp_path: Path, cli: Cli) -> None:
    tree = altered(tmp_path, "2.12.0", *RENAMED)
    before = content(tree)
    for arguments in ([], ["--overlay", tmp_path / "overlay"]):
        status, out, err = cli("bake", "--source", tree, *arguments)
        assert (status, out) == (1, "")
        said = "te-graph-fixes: Nothing was written, because these fixes cannot be applied:\n  backward-amax-red"
        assert err.startswith(said)
        assert err.endswith(f"add it to {DISABLE}. To report the problem, run:\n  te-graph-fixes issue\n")
    assert content(tree) == before


def release(patch: pytest.MonkeyPatch, version: str, *unknown: str) -> None:
    """Replace the package by another release: its version, without fixes that it lacks."""
    for module in (bake, manifest):
        patch.setattr(module, "__version__", version)
    known = {fix_id: fix for fix_id, fix in CATALOGUE.items() if fix_id not in unknown}
    patch.setattr(decision, "CATALOGUE", known)


@pytest.mark.parametrize(
    ("version", "unknown"), [("0.0.9", ["wgrad-hook-order"]), ("0.1.0.dev0+g111111111", []), ("0.2.0", [])]
)
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
    for number in (10, 40, 90, 140):
        assert in_child(lambda: main(["bake", "--source", str(tree)]), number) == -signal.SIGKILL
        assert cli("bake", "--check", "--source", tree)[0] == 1
    status, _, err = cli("bake", "--source", tree)
    assert (status, "Undid the bake of te-graph-fixes " in err) == (0, True)
    assert cli("bake", "--check", "--source", tree)[0] == 0
    assert cli("bake", "--undo", "--source", tree)[0] == 0
    assert content(tree) == before


def test_fixes_that_a_bake_disabled_are_known(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = copy(tmp_path)
    monkeypatch.setenv(DISABLE, "replay-arguments")
    out = cli("bake", "--source", tree)[1]
    assert f", 1 disabled by {DISABLE}). Undo:\n  te-graph-fixes bake --undo --source {tree}\n" in out
    baked = content(tree)
    for setting in ("replay-arguments", ""):
        monkeypatch.setenv(DISABLE, setting)
        for command in ("status", "bake", "bake --check"):
            status, out, _ = cli(*command.split(), "--source", tree)
            assert (status, ", 1 disabled in the bake." in out) == (0, True)
    assert "\nreplay preconditions: disabled in the bake\n  replay-arguments " in cli("status", "--source", tree)[1]
    verdict = read(Source.at(tree)).verdicts["replay-arguments"]
    reason = f"disabled when te-graph-fixes {__version__} baked this TransformerEngine"
    assert (verdict.status, verdict.reason) == ("disabled", reason)
    monkeypatch.setenv(SWITCH, "replay-arguments,none-outputs")
    status, _, err = cli("bake", "--source", tree)
    assert status == 1
    undo = "until `te-graph-fixes bake --undo`"
    assert re.search(f"{undo}: [0-9]+ fixes stay applied and replay-arguments stay disabled", err)
    assert content(tree) == baked


def test_a_fix_that_requires_a_disabled_one_is_no_conflict(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = copy(tmp_path)
    monkeypatch.setenv(DISABLE, "grouped-linear-skip-flag")
    for _ in range(2):
        assert cli("bake", "--source", tree)[0] == 0
    assert "warning" not in cli("status", "--source", tree)[1]


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        (SWITCH, "off", r": \d+ fixes stay applied\.$"),
        (SWITCH, "upstream", r": \d+ fixes stay applied\.$"),
        (DISABLE, "replay-arguments", ": replay-arguments stay applied\\.$"),
        (DISABLE, "param-grad-lifetime", ": delayed-.*, param-.*, warmup-reset stay applied\\.$"),
        (SWITCH, "on", None),
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


def test_a_bake_of_what_upstream_has_merged_agrees_with_its_setting(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = copy(tmp_path)
    before = content(tree)
    monkeypatch.setenv(SWITCH, "off")
    status, _, err = cli("bake", "--source", tree)
    assert (status, content(tree) == before) == (1, True)
    said = rf"\d+ of the \d+ known bugs; all \d+ are disabled by {SWITCH}. Nothing to bake: unset {SWITCH}."
    assert re.match(f"te-graph-fixes: TransformerEngine 2.12.0 has {said}", err)
    monkeypatch.setenv(SWITCH, "upstream")
    assert cli("bake", "--source", tree)[0] == cli("bake", "--source", tree)[0] == 0
    assert "warning" not in cli("status", "--source", tree)[1]


def test_a_manifest_with_other_keys_or_fixes(tree: Path, cli: Cli) -> None:
    """A newer version may have added a key. Missing fixes are baked."""
    data, statuses = json.loads((tree / MANIFEST).read_text()), []
    for changed in ({"another": 1}, {"fixes": {}}):
        (tree / MANIFEST).write_text(json.dumps({**data, **changed}))
        statuses += [cli("bake", *option, "--source", tree)[0] for option in (["--check"], [], ["--check"])]
    assert statuses == [0, 0, 0, 1, 0, 0]


def test_a_bake_of_the_package_in_a_zip_is_the_same(baked: Path, tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path / "package"), "zip", ROOT, "te_graph_fixes")
    paths = [archive, *filter(None, sys.path)]
    program = f"""
import sys
sys.path[:0] = {paths!r}
from te_graph_fixes.commands import cli
cli.bake.__version__ = cli.bake.Manifest.read.__globals__["__version__"] = {__version__!r}  # of the commit
sys.exit(cli.main())
"""
    command = [sys.executable, "-I", "-c", program, "bake", "--check", "--source", baked]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "advice"), [(GRAPH, "discard it with `te-graph-fixes bake --undo --force`"), (ADDED, "")]
)
def test_a_later_edit_is_said(name: str, advice: str, tree: Path, cli: Cli) -> None:
    """An edit is not mistaken for a new installation, even if TE has another version."""
    (tree / name).write_text((tree / name).read_text() + "X = 1\n")
    metadata = next(tree.glob("*.dist-info/METADATA"))
    metadata.write_text(metadata.read_text().replace("Version: 2.12.0", "Version: 2.12.0+local"))
    assert {verdict.status for verdict in read(Source.at(tree)).verdicts.values()} == {Status.UNRECOGNIZED}
    before = content(tree)
    status, out, _ = cli("status", "--source", tree)
    assert (status, len(out.splitlines()), advice in out) == (1, 2, True)
    for command in ("bake", "bake --check", "bake --undo"):
        status, out, err = cli(*command.split(), "--source", tree)
        assert (status, name in out + err) == (1, True)
    assert content(tree) == before
    assert cli("bake", "--undo", "--force", "--source", tree)[0] == 0
    assert modules(tree).items() <= modules(source("2.12.0")).items()
    assert cli("bake", "--force", "--source", tree)[0] == 2


ZEROS, ONES = "0" * 64, "1" * 64
INVALID = (
    *("", "null", "[" * 99999, "{}", '{"files": {}}', {"files": {}}, {"files": None}, {"fixes": None}),
    *({"fixes": {"warmup-reset": {}}}, {"version": 1}, {"te_version": 1}),
    *({"files": {GRAPH: each}} for each in (None, [], ["0", "1"], [ZEROS, ZEROS], [None, ZEROS], [1, 2])),
    *({"files": {path: [ZEROS, ONES]}} for path in ("graph.py", "/etc/passwd", "transformer_engine/../x.py", "")),
    *({"files": {path: [ZEROS, ONES]}} for path in ("transformer_engine/\ud800.py", f"{GRAPH}\n")),
)


@pytest.mark.parametrize("wrong", INVALID)
def test_an_invalid_manifest(wrong: str | dict[str, Any], tree: Path, cli: Cli) -> None:
    data = json.loads((tree / MANIFEST).read_text())
    (tree / MANIFEST).write_text(wrong if isinstance(wrong, str) else json.dumps({**data, **wrong}))
    before = content(tree)
    for command in ("bake", "bake --check", "bake --undo", "bake --undo --force", "status"):
        status, out, err = cli(*command.split(), "--source", tree)
        assert (status, "is not a valid manifest" in out + err) == (1, True)
    assert content(tree) == before


def test_an_original_that_was_changed(tree: Path, cli: Cli) -> None:
    path = tree / f"{GRAPH}{bake.ORIGINAL}"
    path.write_text(path.read_text() + "# edited\n")
    before = content(tree)
    status, _, err = cli("bake", "--undo", "--source", tree)
    assert (status, f"the originals of {GRAPH} are missing or changed" in err) == (1, True)
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


def test_modes_and_owners_are_those_of_the_files_beside(tmp_path: Path) -> None:
    tree, owner = copy(tmp_path), 1234 if os.getuid() == 0 else os.getuid()
    for path in tree.rglob("*"):
        os.chown(path, owner, os.getgid())

    def bake_with_umask() -> None:
        os.umask(0o077)
        assert main(["bake", "--source", str(tree)]) == 0

    assert in_child(bake_with_umask) == 0
    files = [path.stat() for path in tree.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert {(stat.st_mode & 0o777, stat.st_uid) for stat in files} == {(0o644, owner)}


def test_a_te_in_the_current_folder_is_ignored(tmp_path: Path) -> None:
    tree, here = copy(tmp_path / "tree"), tmp_path / "here"
    (here / "transformer_engine" / "pytorch").mkdir(parents=True)
    for name in ("", "pytorch"):
        (here / "transformer_engine" / name / "__init__.py").write_text("open('executed', 'w')\n")
    for module in ("-mte_graph_fixes", "-cfrom te_graph_fixes.__main__ import main; main()"):
        assert f"{tree}/transformer_engine" in python(module, "status", cwd=here, path=tree).stdout
        assert python(module, "bake", cwd=here, path=tree).returncode == 0
        assert not (here / "executed").exists()
    assert f"\nin {here}/transformer_engine" in python("-m", "te_graph_fixes", "status", cwd=here, path=here).stdout
    assert f"\nin {here}/transformer_engine" in python("-m", "te_graph_fixes", "status", cwd=here, path=".").stdout


def test_a_lock_of_another_process(tree: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command waits for a minute, and names the other process."""
    location, clock = tree / "transformer_engine", itertools.count(0, 5)
    monkeypatch.setattr(bake, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None))
    program = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", program, location]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        status, _, err = cli("bake", "--undo", "--source", tree)
        other.kill()
    holder = f"process {other.pid} on {platform.node()}"
    said = f"te-graph-fixes: Waiting for {holder}, which has locked {location}.\nte-graph-fixes: Nothing was changed, "
    assert (status, err) == (1, f"{said}because {holder} still has {location} locked. Try again later.\n")


@pytest.mark.parametrize("output", [">/dev/full", ">/dev/full 2>&1", ">&- 2>&-", "| false"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_is_full_or_closed(output: str, unbuffered: str, tmp_path: Path) -> None:
    tree = copy(tmp_path)
    command = f"{sys.executable} -m te_graph_fixes bake --source {tree}"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered, "PYTHONPATH": str(ROOT)}
    for option, wanted in (("", 0), ("--check", 0), ("--undo", 0), ("--undo", 1)):
        shell = ["bash", "-c", f"({command} {option}; echo $? >{tree}/status) {output}"]
        subprocess.run(shell, env=environment, check=False, capture_output=True)
        assert (tree / "status").read_text() == f"{wanted}\n"


@pytest.mark.parametrize("version", ["2.14.0", "2.12.0"])
@pytest.mark.parametrize("command", ["bake", "bake --undo", "bake --undo --force"])
def test_a_te_that_was_installed_over_a_bake(version: str, command: str, tree: Path, tmp_path: Path, cli: Cli) -> None:
    """If the version is the same, the result is an interrupted bake."""
    reinstall(tree, version)
    new = modules(copy_of(source(version), tmp_path / "new"))
    status, out, _ = cli("status", "--source", tree)
    assert status == cli("bake", "--check", "--source", tree)[0] == 1
    said = "was interrupted, or is running" if version == "2.12.0" else f"{__version__} baked it, and old files remain"
    assert said in out
    status, out, err = cli(*command.split(), "--source", tree)
    assert (status, f"Undid the bake of te-graph-fixes {__version__}: " in out + err) == (0, True)
    assert cli("bake", "--check", "--source", tree)[0] == int(command != "bake")
    if command == "bake":
        assert cli("bake", "--undo", "--source", tree)[0] == 0
    assert modules(tree) == new


def reinstall(tree: Path, version: str) -> None:
    """Reinstall TE as pip does: delete the files that its record names, and write those of another version."""
    for path in copy_of(source("2.12.0"), tree.parent / "record").rglob("*"):
        if path.is_file():
            (tree / path.relative_to(tree.parent / "record")).unlink(missing_ok=True)
    copy_of(source(version), tree)


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


def test_a_bake_with_which_te_cannot_be_imported_is_undone(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TE is a stand-in here that imports none of its modules, and fails if it is fixed."""
    tree = copy(tmp_path)
    for name in ("transformer_engine", "transformer_engine/pytorch", "transformer_engine/pytorch/module"):
        (tree / name / "__init__.py").write_text("")
    before = content(tree)
    monkeypatch.syspath_prepend(tree)
    monkeypatch.setenv("PYTHONPATH", f"{tree}{os.pathsep}{ROOT}")
    (tree / "transformer_engine" / "pytorch" / "__init__.py").write_text("import transformer_engine.nowhere\n")
    status, out, err = cli("bake")
    assert status == 0
    assert "cannot be imported here, even without fixes: ModuleNotFoundError: No module named" in err
    assert cli("bake", "--undo")[0] == 0
    refuses = f"import pathlib\nassert not pathlib.Path({str(tree / MANIFEST)!r}).exists(), 'corrected'\n"
    (tree / "transformer_engine" / "pytorch" / "__init__.py").write_text(refuses)
    before = content(tree)
    status, out, err = cli("bake")
    assert (status, out) == (1, "")
    assert "TransformerEngine cannot be imported baked: AssertionError: corrected" in err
    assert content(tree) == before
