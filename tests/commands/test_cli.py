"""``te-graph-fixes status``, ``diff`` and ``list`` on published sources."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import te_graph_fixes
from te_graph_fixes.commands import answers
from te_graph_fixes.commands.cli import COMMANDS, main
from te_graph_fixes.decision import verdicts, with_required
from te_graph_fixes.fix import GROUPS
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.installation import patched
from te_graph_fixes.patching.source import Source
from te_graph_fixes.settings import DISABLE, SWITCH
from te_graph_fixes.stamp import MADE, of_source
from te_graph_fixes.state import State
from tests.support.child import ROOT, Cli, python
from tests.support.published import COVERED, RENAMED, altered, needed, source
from tools import newest


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"\n", b"\r\n"), (b"    if is_training:\n", b"    if is_training:  # form\x0cfeed\n"), (b"\n", b"\n\x0c\n")],
    ids=["carriage returns", "form feed in a line", "form feeds on lines of their own"],
)
def test_a_diff_fits_whatever_breaks_the_lines(tmp_path: Path, cli: Cli, old: bytes, new: bytes) -> None:
    tree = altered(tmp_path, "2.12.0")
    graph = tree / "transformer_engine" / "pytorch" / "graph.py"
    graph.write_bytes(graph.read_bytes().replace(old, new))
    status, out, _ = cli("diff", "--source", tree)
    assert status == 0
    texts = dict(written(tree))
    subprocess.run(["patch", "-p1", "--fuzz=0"], input=out.encode(), cwd=tree, check=True, capture_output=True)
    for path, text in texts.items():
        found = path.read_bytes()
        assert (found.count(b"\r\n") == found.count(b"\n")) == (new == b"\r\n" and path == graph)
        assert found.replace(b"\r\n", b"\n") == text
    assert of_source(Source.at(tree))


def written(tree: Path) -> Iterator[tuple[Path, bytes]]:
    """What `diff` makes of each file that it changes or adds."""
    te = Source.at(tree)
    verdict_of = verdicts(te)
    for name, (_, after) in patched(
        te, {fix: each for fix, each in verdict_of.items() if each.state == State.APPLICABLE}
    ).items():
        found = te.find(name)
        yield Path(found.path) if found else tree.joinpath(*name.split(".")).with_suffix(".py"), after.encode()


@pytest.mark.parametrize("version", ["2.10.0", "2.12.0", "2.15.0", COVERED[-1]])
def test_status_as_text(version: str, cli: Cli) -> None:
    status, out, _ = cli("status", "--source", source(version))
    assert status == 0
    count = len(needed(version))
    first, second, *_ = out.splitlines()
    assert first == (
        f"TransformerEngine {version}: of {len(CATALOGUE)} known defects, {count} can be corrected. "
        f"Next: te-graph-fixes bake --source {source(version)}"
    )
    assert second == f"in {source(version)}/transformer_engine (te-graph-fixes {te_graph_fixes.__version__})"
    affected = {fix: fix_of.symptom for fix, fix_of in CATALOGUE.items() if fix in needed(version)}
    assert listed(out) == affected
    assert re.findall("^ +who: (.*)$", out, re.MULTILINE) == [CATALOGUE[fix].users for fix in listed(out)]
    groups = [line for line in out.splitlines()[2:] if line and not line.startswith(" ")]
    assert groups == [group for group in GROUPS if any(CATALOGUE[fix].group == group for fix in affected)]
    more = listed(cli("status", "--all", "--source", source(version))[1])
    assert set(more) == set(CATALOGUE)
    assert all(more[fix].startswith(("not-needed: ", "not-applicable: ")) for fix in set(CATALOGUE) - set(affected))


def listed(out: str) -> dict[str, str]:
    """The line of each fix in ``status``."""
    return dict(line.split(maxsplit=1) for line in out.splitlines() if re.match("  [a-z]", line))


@pytest.mark.parametrize(
    "fix", ["warmup-reset", "leaf-grad-lifetime", "skip-flag-accessors", "replay-arguments", "stale-fp8-weights"]
)
def test_a_fix_is_explained(fix: str, cli: Cli) -> None:
    version = next(version for version in reversed(COVERED) if fix in needed(version))
    status, out, err = cli("explain", fix, "--source", source(version))
    assert (status, err) == (0, "")
    record = CATALOGUE[fix]
    assert out.startswith(f"{fix} ({record.group}): {record.summary}\n\nsymptom    {record.symptom}\n")
    assert f"\naffected   {record.users}\nversions   TransformerEngine {record.versions}\n" in out
    assert f"\nhere       TransformerEngine {version}: it has this defect\n" in out
    assert (f"\ncost       {record.cost}\n" in out) == bool(record.cost)
    assert f"\nleave out  TE_GRAPH_FIXES_DISABLE={fix}\n" in out
    assert all(link in re.findall("^upstream .*", out, re.MULTILINE)[0] for link in record.upstream)
    wanted = " ".join(sorted(with_required(fix)))
    assert re.search(rf"\nchange     te-graph-fixes diff {wanted} --source {source(version)}\n", out)
    for dependent in (other for other in CATALOGUE.values() if fix in other.requires):
        assert dependent.id in re.findall("also leaves out (.*): wrong without it", out)[0]
    assert out.count(record.symptom) == 1
    assert ("3 µs of the CPU a call" in out) == (fix == "replay-arguments")


@pytest.mark.parametrize("fix", CATALOGUE)
def test_an_explanation_is_for_users(fix: str) -> None:
    """No marks of reStructuredText, no paths of a checkout, and the patch itself in place of a whole diff."""
    text = "\n".join(answers.explain(CATALOGUE[fix]))
    account, _, patch = text.partition("\nThe change, in TE's own lines:\n\n")
    assert patch.startswith("@@ ")
    assert re.search(r"^\+", patch, re.MULTILINE) or re.search("^-", patch, re.MULTILINE)
    assert not re.search(r"``|docs/|shipped/|^Symptom|^Upstream:", account, re.MULTILINE)


def test_a_fix_of_a_baked_te_is_explained(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = altered(tmp_path, "2.12.0")
    assert cli("bake", "--source", tree)[0] == 0
    out = cli("explain", "warmup-reset", "--source", tree)[1]
    assert f"\nleave out  te-graph-fixes bake --undo --source {tree}, then bake with {DISABLE}=warmup-reset\n" in out
    assert "\nchange " not in out


def test_status_as_json(cli: Cli) -> None:
    status, out, _ = cli("status", "--json", "--source", source("2.15.0"))
    found = json.loads(out)
    assert status == 0
    assert (found["te_version"], found["source"]) == ("2.15.0", f"{source('2.15.0')}/transformer_engine")
    assert set(found["fixes"]) == set(CATALOGUE)
    assert found["fixes"]["warmup-reset"] == {
        "verdict": "not-needed",
        "expected": "not-needed",
        "reason": "by shape: warmup leaves is_first_microbatch alone",
        "upstream": ["https://github.com/NVIDIA/TransformerEngine/pull/2715"],
    }


def test_the_source_decides_against_the_version(cli: Cli, tmp_path: Path) -> None:
    tree = altered(tmp_path, "2.15.0", says="2.17.0+vendor")
    found = json.loads(cli("status", "--json", "--source", tree)[1])["fixes"]["grouped-linear-skip-flag"]
    assert (found["verdict"], found["expected"]) == ("applicable", "not-needed")
    assert "(the published 2.17.0 does not have this defect)" in found["reason"]


def test_a_source_that_is_not_recognised(cli: Cli, tmp_path: Path) -> None:
    tree = altered(tmp_path, "2.12.0", *RENAMED)
    status, out, _ = cli("status", "--source", tree)
    assert status == 1
    answered = r"of \d+ known defects, \d+ can be corrected, \d+ not recognised. Next: te-graph-fixes issue "
    assert re.search(answered, out)
    assert f"\nnot recognised, so it may be there (te-graph-fixes issue --source {tree} says why)\n" in out
    assert listed(out)["backward-dw-order"] == CATALOGUE["backward-dw-order"].symptom
    assert "looked for" not in out


@pytest.mark.parametrize(
    ("variable", "value", "answered"),
    [
        (SWITCH, "off", r"{} left out by TE_GRAPH_FIXES. Next: unset TE_GRAPH_FIXES"),
        (SWITCH, "upstream", r"\d+ can be corrected, \d+ left out by TE_GRAPH_FIXES. Next: te-graph-fixes bake"),
        (SWITCH, "none-outputs", r"1 can be corrected, \d+ left out by TE_GRAPH_FIXES. Next: te-graph-fixes bake"),
        (DISABLE, "replay-arguments", r"\d+ can be corrected, 1 left out by TE_GRAPH_FIXES_DISABLE. Next: te-graph-"),
    ],
)
def test_what_the_settings_leave_out_is_still_a_defect(
    variable: str, value: str, answered: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    status, out, _ = cli("status", "--source", source("2.12.0"))
    assert status == 0
    answered = answered.format(len(needed("2.12.0")))
    assert re.match(rf"TransformerEngine 2.12.0: of \d+ known defects, {answered}", out)
    assert set(listed(out)) == set(needed("2.12.0"))


def test_a_te_that_is_too_old_is_refused_in_one_line(cli: Cli) -> None:
    reason = "because version 2.9.0 is older than 2.10, the oldest that is tested: upgrade it, or switch graphs off"
    status, out, _ = cli("status", "--source", source("2.9.0"))
    assert (status, len(out.splitlines())) == (1, 2)
    assert out.startswith(f"TransformerEngine 2.9.0: nothing is applied, {reason}\n")
    assert cli("bake", "--source", source("2.9.0")) == (
        1,
        "",
        f"te-graph-fixes: nothing was written, {reason}\n",
    )


def test_a_source_that_is_indented_by_tabs(cli: Cli, tmp_path: Path) -> None:
    tree = altered(tmp_path, "2.12.0")
    path = tree / "transformer_engine" / "pytorch" / "graph.py"
    path.write_text("".join(re.sub("^ +", tabs, line) for line in path.read_text().splitlines(keepends=True)))
    compile(path.read_text(), "graph.py", "exec")
    assert cli("status", "--source", tree)[0] == 0
    _, out, _ = cli("diff", "--source", tree)
    subprocess.run(["git", "apply", "-p1", "-"], input=out, text=True, cwd=tree, check=True)
    compile(path.read_text(), "graph.py", "exec")


def tabs(indent: re.Match[str]) -> str:
    return "\t" * (len(indent[0]) // 4) + " " * (len(indent[0]) % 4)


def test_status_leaves_out_what_the_settings_leave_out(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = altered(tmp_path, "2.12.0", "skip_fp8_weight_update", "another_name", "module/grouped_linear.py")
    found = json.loads(cli("status", "--json", "--source", tree)[1])["fixes"]
    unknown = {fix for fix, record in found.items() if record["verdict"] == "unrecognized"}
    assert {"grouped-linear-skip-flag", "warmup-reset"} <= unknown
    assert found["warmup-reset"]["reason"].startswith("it requires grouped-linear-skip-flag, which is unrecognized")
    assert cli("status", "--source", tree)[0] == cli("diff", "--source", tree)[0] == 1
    monkeypatch.setenv(DISABLE, ",".join(unknown))
    status, out, _ = cli("status", "--json", "--source", tree)
    assert status == cli("diff", "--source", tree)[0] == 0
    assert {fix for fix, record in json.loads(out)["fixes"].items() if record["verdict"] == "disabled"} == unknown
    monkeypatch.delenv(DISABLE)
    monkeypatch.setenv(SWITCH, "warmup-reset")
    status, _, err = cli("status", "--source", source("2.12.0"))
    assert status == 2
    assert err.endswith("; write grouped-linear-skip-flag,param-grad-lifetime,stale-fp8-weights,warmup-reset\n")
    monkeypatch.setenv(SWITCH, err.split()[-1])
    assert cli("status", "--source", source("2.12.0"))[0] == 0


def test_the_package_folder_itself(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source("2.12.0") / "transformer_engine")
    here, there = (cli("status", "--source", each) for each in (".", source("2.12.0")))
    assert (here[0], here[1].splitlines()[1:]) == (there[0], there[1].splitlines()[1:])


@pytest.mark.parametrize("command", ["list", "diff", "status", "status --json", "run --help", "run --print-env"])
def test_output_that_cannot_be_written(command: str) -> None:
    start = [sys.executable, "-m", "te_graph_fixes", *command.split()]
    options = ["--source", str(source("2.12.0"))] if command.startswith(("diff", "status")) else []
    with open("/dev/full", "w") as full:
        done = subprocess.run([*start, *options], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("te-graph-fixes: cannot write: No space left on device\n")
    assert "Traceback" not in done.stderr
    with subprocess.Popen(
        [*start, *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait() == 141
        assert "Error" not in process.stderr.read()


@pytest.mark.parametrize("command", ["list", "--version", "status", "diff", "run true"])
def test_a_bad_setting_is_said_where_it_counts(command: str) -> None:
    done = python("-m", "te_graph_fixes", *command.split(), **{SWITCH: "wormup-reset"})
    counts = command not in ("list", "--version")
    assert done.returncode == 2 * counts
    assert ("TE_GRAPH_FIXES: unknown fix wormup-reset; did you mean warmup-reset? valid: " in done.stderr) == counts
    assert "Traceback" not in done.stderr


def test_the_version(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"te-graph-fixes {te_graph_fixes.__version__}\n"
    status = json.loads(cli("status", "--json", "--source", source("2.12.0"))[1])
    assert status["te_graph_fixes_version"] == te_graph_fixes.__version__


def test_what_a_report_needs(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = altered(tmp_path, "2.12.0", *RENAMED)
    monkeypatch.setattr("te_graph_fixes.commands.cli.issues", lambda: "")
    status, out, err = cli("issue", "--source", tree)
    assert (status, err) == (0, "te-graph-fixes: send it to whoever gave you the package\n")
    assert out.startswith(f"te-graph-fixes {te_graph_fixes.__version__}, TransformerEngine 2.12.0\nPython 3.")
    assert "\nbackward-dw-order: unrecognized" in out
    assert "looked for one definition of _make_graphed_callables in transformer_engine/pytorch/graph.py" in out
    assert str(tmp_path) not in out
    published = set(cli("issue", "--source", source("2.12.0"))[1].splitlines())
    new = [line.split()[1] for line in out.splitlines() if line.endswith(".py") and line not in published]
    assert new == ["transformer_engine/pytorch/graph.py"]


def test_a_te_that_is_not_as_expected(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert newest.main([str(source("2.20.2")), str(source("2.10.0"))]) == 0
    assert newest.main([str(altered(tmp_path / "old", "2.12.0", *RENAMED, says="2.12.0"))]) == 1
    assert "! backward-dw-order          unrecognized   expected applicable" in capsys.readouterr().out
    assert newest.main([str(altered(tmp_path / "new", "2.12.0", *RENAMED, says="2.99.0"))]) == 1
    assert "! skip-flag-accessors" not in capsys.readouterr().out


def test_diff_of_one_fix(cli: Cli) -> None:
    status, out, err = cli("diff", "--source", source("2.15.0"), "skip-flag-accessors")
    assert (status, err) == (0, "")
    change, stamp = out.split("--- /dev/null")
    assert f'"skip-flag-accessors": "{MADE}"' in stamp
    names, lines = change.splitlines()[:2], change.splitlines()[2:]
    assert names == [f"{side}/transformer_engine/pytorch/quantization.py" for side in ("--- a", "+++ b")]
    assert not any(line.startswith("-") for line in lines)
    assert sum(line.startswith("+def ") or "+    def " in line for line in lines) == 2


def test_list_has_every_fix(cli: Cli) -> None:
    status, out, _ = cli("list")
    assert status == 0
    for fix in CATALOGUE.values():
        assert f"  {fix.id}: {fix.symptom}\n    TransformerEngine {fix.versions}; " in out
        assert all(link in out for link in fix.upstream)
    *groups, upstream = [line for line in out.splitlines() if line and line[0] != " "]
    assert groups == list(GROUPS)
    assert upstream.startswith("TE_GRAPH_FIXES=upstream applies")
    assert "TransformerEngine 2.10 to 2.11; corrected in TransformerEngine 2.12" in out


def test_list_as_json(cli: Cli) -> None:
    status, out, _ = cli("list", "--json")
    records = json.loads(out)
    assert (status, list(records)) == (0, list(CATALOGUE))
    assert records["warmup-reset"]["affected"] == "<2.14"
    assert records["warmup-reset"]["users"] == CATALOGUE["warmup-reset"].users


def test_diff_takes_what_it_suggests(cli: Cli) -> None:
    status, _, err = cli("diff", "--source", source("2.12.0"), "warmup-reset")
    assert status == 2
    status, out, _ = cli("diff", "--source", source("2.12.0"), err.split("; write ")[1].strip())
    assert (status, "+++ b/transformer_engine/pytorch/graph.py" in out) == (0, True)


@pytest.mark.parametrize("missing", ["wrapt", "packaging"])
@pytest.mark.parametrize("command", ["status", "bake", "run true"])
def test_a_command_without_a_dependency_says_so_in_one_line(missing: str, command: str, tmp_path: Path) -> None:
    block = f"import sys\nsys.modules[{missing!r}] = None\nsys.modules['{missing}.version'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(block)
    done = python("-m", "te_graph_fixes", *command.split(), path=tmp_path)
    if (missing, command) == ("packaging", "run true"):
        assert done.returncode == 0  # it needs none
        return
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert done.stderr.startswith("te-graph-fixes: ")
    assert missing in done.stderr


def test_no_te_names_the_interpreter(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    assert cli("status") == (2, "", f"te-graph-fixes: transformer_engine is not installed in {sys.executable}\n")


UNKNOWN = "unknown fix wormup-reset; did you mean warmup-reset? valid: see te-graph-fixes list"


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("status --jsno", 2, "status does not take --jsno; see te-graph-fixes status -h"),
        ("list all", 2, "list does not take all; see te-graph-fixes list -h"),
        ("bake --undo --overlay x", 2, "bake takes one of --check, --undo and --overlay"),
        ("status --source ''", 2, "no transformer_engine package in ''"),
        ("diff --source /tmp", 2, "no transformer_engine package in '/tmp': expected /tmp/transformer_engine/__init__"),
        ("explain wormup-reset", 2, UNKNOWN),
        ("diff wormup-reset --source 2.15.0", 2, UNKNOWN),
        ("verify wormup-reset", 2, "did you mean warmup-reset"),
        ("diff warmup-reset --source 2.12.0", 2, "warmup-reset requires "),
        ("diff warmup-reset --source 2.15.0", 0, "warmup-reset is not-needed: warmup leaves is_first_microbatch alone"),
        ("diff --source 2.12.0", 0, "no changes: `te-graph-fixes status --all --source "),
    ],
)
def test_what_is_said_in_place_of_output(
    command: str, status: int, said: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    if status == 0:
        monkeypatch.setenv(SWITCH, "off")
    words = [str(source(word)) if word[:2] == "2." else word for word in shlex.split(command)]
    found = cli(*words)
    assert found[:2] == (status, "")
    assert said in found[2]
    assert found[2].startswith("te-graph-fixes: ")


@pytest.mark.parametrize("arguments", [[], ["statsu"], ["status", "--source"]])
def test_the_usage_is_said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert capsys.readouterr().err.startswith("usage: te-graph-fixes ")


@pytest.mark.parametrize("command", [*COMMANDS])
def test_each_command_has_help(command: str) -> None:
    done = python("-m", "te_graph_fixes", command, "-h")
    assert re.search(r"^exit status: .*\d", done.stdout, re.MULTILINE)
    assert f"\nexample: te-graph-fixes {command}" in done.stdout


def test_the_help_leads_through_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["-h"])
    steps = ["in this order:", "status ", "run ", "verify ", "TE_GRAPH_FIXES=off ", "bake ", "bake --undo "]
    assert re.search(r".*?\n  (?:te-graph-fixes )?".join(steps), capsys.readouterr().out, re.DOTALL)
