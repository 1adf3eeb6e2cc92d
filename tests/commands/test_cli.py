"""Test ``te-graph-fixes status``, ``explain``, ``diff``, ``issue`` and ``list`` on sources of published releases."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import te_graph_fixes
from te_graph_fixes.commands import texts
from te_graph_fixes.commands.cli import COMMANDS, main
from te_graph_fixes.decision import Reading, decide
from te_graph_fixes.fix import GROUPS, Assessment
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.source import Source
from te_graph_fixes.settings import DISABLE, SWITCH, Settings
from te_graph_fixes.status import Verdict
from tests.support.child import ROOT, Cli, python
from tests.support.published import COVERED, RENAMED, altered, needed, source
from tools import newest


def listed(out: str) -> dict[str, str]:
    """Return, by id of a fix, the text that ``status`` prints after the id."""
    return dict(line.split(maxsplit=1) for line in out.splitlines() if re.match("  [a-z]", line))


def test_the_summary_if_no_bug_can_be_fixed() -> None:
    """The summary is one sentence, even if each bug has its own reason."""
    verdicts = {fix: Assessment(Verdict.NOT_NEEDED, "corrected") for fix in CATALOGUE}
    verdicts |= {fix: Assessment(Verdict.UNRECOGNIZED, f"no {fix}") for fix in ("none-outputs", "warmup-reset")}
    summary = texts.summary_line(decide(Reading(Source("", "2.12.0"), verdicts), Settings()))
    assert summary.endswith(" known bugs; all 2 may be there, but cannot be fixed.")


@pytest.mark.parametrize("version", ["2.10.0", COVERED[-1]])
def test_status_as_text(version: str, cli: Cli) -> None:
    status, out, _ = cli("status", "--source", source(version))
    assert status == 0
    first, second, *_ = out.splitlines()
    count = len(needed(version))
    assert first == (
        f"TransformerEngine {version} has {count} of the {len(CATALOGUE)} known bugs; all {count} can be fixed."
    )
    assert second == f"in {source(version)}/transformer_engine (te-graph-fixes {te_graph_fixes.__version__})"
    affected = {fix: fix_of.symptom for fix, fix_of in CATALOGUE.items() if fix in needed(version)}
    assert listed(out) == affected
    assert "bake" not in out  # With --source, `status` suggests no command that writes into TE.
    groups = [line for line in out.splitlines()[2:] if line and not line.startswith(" ")]
    members = {CATALOGUE[fix].group for fix in affected}
    assert groups == [f"{group}: can be fixed" for group in GROUPS if group in members]
    whole = cli("status", "--all", "--source", source(version))[1]
    more = listed(whole)
    assert re.findall("^ +affects: (.*)$", whole, re.MULTILINE) == [CATALOGUE[fix].affects for fix in listed(out)]
    assert set(more) == set(CATALOGUE)
    assert all(more[fix].startswith(("not-needed: ", "not-applicable: ")) for fix in set(CATALOGUE) - set(affected))


@pytest.mark.parametrize("fix", ["warmup-reset", "replay-arguments"])
def test_a_fix_is_explained(fix: str, cli: Cli) -> None:
    status, out, err = cli("explain", fix)
    assert (status, err) == (0, "")
    record = CATALOGUE[fix]
    assert out.startswith(f"{fix} ({record.group})\n\n{record.summary}\n\nsymptom    {record.symptom}\n")
    assert f"\naffects    {record.affects}\nversions   TransformerEngine {record.versions}\n" in out
    assert f"\ncost       {record.cost or 'none known'}\n" in out
    assert (
        f"\ndisable    TE_GRAPH_FIXES_DISABLE={fix} (if it is baked, first run `te-graph-fixes bake --undo`)\n" in out
    )
    assert all(link in re.findall("^upstream .*", out, re.MULTILINE)[0] for link in record.upstream)
    assert f"\ndiff       te-graph-fixes diff {fix}\n" in out
    for dependent in (other for other in CATALOGUE.values() if fix in other.requires):
        assert dependent.id in re.findall("also disables (.*), which depend on it", out)[0]


def test_an_explanation_is_for_users() -> None:
    """An explanation contains the patch instead of a diff, but no reStructuredText and no paths of a checkout."""
    for fix in CATALOGUE.values():
        text = "\n".join(texts.explain(fix))
        account, _, patch = text.partition("\nThe patch, with TE's own lines:\n\n")
        assert patch.startswith("@@ "), fix.id
        assert re.search(r"^[+-]", patch, re.MULTILINE), fix.id
        assert not re.search(r"``|docs/|support/|^Symptom|^Upstream:", account, re.MULTILINE), fix.id


def test_status_as_json(cli: Cli, tmp_path: Path) -> None:
    """The verdicts come from the source, not from the version."""
    tree = altered(tmp_path, "2.15.0", says="2.17.0+vendor")
    status, out, _ = cli("status", "--json", "--source", tree)
    found = json.loads(out)
    assert (status, found["te_version"], found["source"]) == (0, "2.17.0+vendor", f"{tree}/transformer_engine")
    assert found["te_graph_fixes_version"] == te_graph_fixes.__version__
    assert set(found["fixes"]) == set(CATALOGUE)
    assert found["fixes"]["warmup-reset"] == {
        "status": "not-needed",
        "expected": "not-needed",
        "reason": "warmup does not change is_first_microbatch",
        "upstream": ["https://github.com/NVIDIA/TransformerEngine/pull/2715"],
    }
    other = found["fixes"]["grouped-linear-skip-flag"]
    assert (other["status"], other["expected"]) == ("applicable", "not-needed")


def test_a_source_that_is_not_recognized(cli: Cli, tmp_path: Path) -> None:
    tree = altered(tmp_path, "2.12.0", *RENAMED)
    status, out, _ = cli("status", "--source", tree)
    assert status == 1
    assert re.search(r" known bugs: \d+ may be there, but cannot be fixed, \d+ can be fixed\.\n", out)
    assert f"\nFor details about the bugs that cannot be fixed:\n  te-graph-fixes issue --source {tree}\n" in out
    assert listed(out)["backward-dw-order"] == CATALOGUE["backward-dw-order"].symptom
    assert "looked for" not in out
    status, out, err = cli("issue", "--source", tree)
    assert (status, err) == (0, "te-graph-fixes: Send this text to the maintainers of te-graph-fixes.\n")
    assert out.startswith(f"te-graph-fixes {te_graph_fixes.__version__}, TransformerEngine 2.12.0\nPython 3.")
    assert "\nbackward-dw-order: unrecognized" in out
    assert "looked for one definition of _make_graphed_callables in transformer_engine/pytorch/graph.py" in out
    assert str(tmp_path) not in out
    published = set(cli("issue", "--source", source("2.12.0"))[1].splitlines())
    new = [line.split()[1] for line in out.splitlines() if line.endswith(".py") and line not in published]
    assert new == ["transformer_engine/pytorch/graph.py"]


@pytest.mark.parametrize(
    ("variable", "value", "answered"),
    [
        (SWITCH, "off", r"; all {} are disabled by TE_GRAPH_FIXES\.\n"),
        (SWITCH, "upstream", r": \d+ can be fixed, \d+ disabled by TE_GRAPH_FIXES\.\n"),
        (DISABLE, "replay-arguments", r": \d+ can be fixed, 1 disabled by TE_GRAPH_FIXES_DISABLE\.\n"),
        ("TE_GRAPH_FIXES_VERSION", "1", r"; all {} can be fixed\.\n"),
    ],
)
def test_a_bug_whose_fix_is_disabled_is_listed(
    variable: str, value: str, answered: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    status, out, err = cli("status", "--source", source("2.12.0"))
    assert status == 0
    answered = answered.format(len(needed("2.12.0")))
    assert re.match(rf"TransformerEngine 2.12.0 has \d+ of the \d+ known bugs{answered}", out)
    assert set(listed(out)) == set(needed("2.12.0"))
    is_none = variable == "TE_GRAPH_FIXES_VERSION"
    said = "te-graph-fixes: Ignoring TE_GRAPH_FIXES_VERSION: te-graph-fixes has no such variable. Did you mean "
    assert (err.startswith(said), err.count("\n")) == (is_none, is_none)


def test_the_package_folder_itself(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source("2.12.0") / "transformer_engine")
    assert cli("status", "--source", ".") == cli("status", "--source", source("2.12.0"))


@pytest.mark.parametrize("command", ["list", "run --print-env"])
def test_output_that_cannot_be_written(command: str) -> None:
    start = [sys.executable, "-m", "te_graph_fixes", *command.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(start, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "te-graph-fixes: [Errno 28] No space left on device\n")
    with subprocess.Popen(start, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.wait(), process.stderr.read()) == (141, "")


def test_a_te_that_is_not_as_expected(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert newest.main([str(source("2.20.2")), str(source("2.10.0"))]) == 0
    assert newest.main([str(altered(tmp_path / "old", "2.12.0", *RENAMED, says="2.12.0"))]) == 1
    assert "! backward-dw-order          unrecognized   expected applicable" in capsys.readouterr().out
    assert newest.main([str(altered(tmp_path / "new", "2.12.0", *RENAMED, says="2.99.0"))]) == 1
    assert "! skip-flag-accessors" not in capsys.readouterr().out


def test_diff_of_one_fix(cli: Cli) -> None:
    status, out, err = cli("diff", "--source", source("2.15.0"), "skip-flag-accessors")
    assert (status, err) == (0, "")
    manifest, change = out.split("--- a/")
    assert '"skip-flag-accessors": "applied"' in manifest
    names, lines = change.splitlines()[:2], change.splitlines()[2:]
    assert names == [f"{side}transformer_engine/pytorch/quantization.py" for side in ("", "+++ b/")]
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
    assert "TransformerEngine 2.10 to 2.11; fixed in TransformerEngine 2.12" in out
    status, out, _ = cli("list", "--json")
    records = json.loads(out)
    assert (status, list(records)) == (0, list(CATALOGUE))
    warmup = {name: records["warmup-reset"][name] for name in ("since", "merged", "affects")}
    assert warmup == {"since": "2.10", "merged": "2.14", "affects": CATALOGUE["warmup-reset"].affects}


@pytest.mark.parametrize(("missing", "command"), [("wrapt", "run true"), ("packaging", "bake")])
def test_a_missing_dependency_is_one_line(missing: str, command: str, tmp_path: Path) -> None:
    block = f"import sys\nsys.modules[{missing!r}] = None\nsys.modules['{missing}.version'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(block)
    done = python("-m", "te_graph_fixes", *command.split(), path=tmp_path)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert done.stderr.startswith("te-graph-fixes: ")
    assert missing in done.stderr


def test_status_of_the_installed_te_names_the_check(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(source("2.14.0"))
    out = cli("status")[1]
    commands = ["TE_GRAPH_FIXES=off te-graph-fixes run --check CMD", "te-graph-fixes run CMD", "te-graph-fixes bake"]
    assert re.findall("^  (.*te-graph-fixes .*)$", out, re.MULTILINE) == commands


UNKNOWN = "unknown fix wormup-reset. Did you mean warmup-reset? Valid: the ids that `te-graph-fixes list` prints"


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("status --source ''", 2, "no transformer_engine package in ''"),
        ("diff --source /tmp", 2, "no transformer_engine package in '/tmp': expected /tmp/transformer_engine/__init__"),
        ("explain wormup-reset", 2, UNKNOWN),
        ("diff wormup-reset --source 2.15.0", 2, UNKNOWN),
        (
            "diff warmup-reset --source 2.15.0",
            0,
            "warmup-reset is not-needed: warmup does not change is_first_microbatch",
        ),
        ("diff --source 2.12.0", 0, "No changes. For the reasons, run `te-graph-fixes status --all --source "),
    ],
)
def test_messages_instead_of_output(
    command: str, status: int, said: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    if status == 0:
        monkeypatch.setenv(SWITCH, "off")
    words = [str(source(word)) if word[:2] == "2." else word for word in shlex.split(command)]
    found = cli(*words)
    assert found[:2] == (status, "")
    assert said in found[2]
    assert found[2].startswith("te-graph-fixes: ")


def test_the_usage_and_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["statsu"], ["status", "--source"], ["status", "--jsno"], ["bake", "--undo", "--check"]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert capsys.readouterr().err.startswith("usage: te-graph-fixes ")
    for name in COMMANDS.keys() - {"run"}:
        text = COMMANDS[name].format_help()
        assert re.search(r"^exit status: .*\d", text, re.MULTILINE)
        assert f"\nexample: te-graph-fixes {name}" in text
    with pytest.raises(SystemExit):
        main(["-h"])
    steps = ["in this order:", "status ", "run ", "TE_GRAPH_FIXES=off", "bake ", "bake --undo "]
    assert re.search(".*?".join(steps), capsys.readouterr().out, re.DOTALL)
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"te-graph-fixes {te_graph_fixes.__version__}\n"


@pytest.mark.parametrize("start", [["-m", "te_graph_fixes"], ["-mte_graph_fixes"], ["te-graph-fixes"]])
def test_a_command_applies_no_fixes(start: list[str], tmp_path: Path) -> None:
    """An invalid setting is an error without a traceback, and commands that read no settings still work."""
    if start == ["te-graph-fixes"]:
        start = [str(tmp_path / "te-graph-fixes")]
        Path(*start).write_text("import sys\nfrom te_graph_fixes.__main__ import main\nsys.exit(main())\n")
    for command, status in (("list", 0), ("status", 2)):
        done = python(*start, command, TE_GRAPH_FIXES="warmup-rest")
        assert (done.returncode, "Traceback" in done.stderr) == (status, False)


def test_an_embedded_python_has_no_executable() -> None:
    done = python("-c", "import sys; sys.executable = None\nimport te_graph_fixes\nte_graph_fixes.report()")
    assert (done.returncode, done.stderr) == (0, "")
