"""Test the rules that every fix in the catalogue must follow."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest
from packaging.version import Version

from te_graph_fixes import fixes
from te_graph_fixes.fix import GROUPS, OLDEST, Fix
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.source import Source
from te_graph_fixes.status import Verdict

EVERY = pytest.mark.parametrize("fix", CATALOGUE.values(), ids=list(CATALOGUE))


def test_every_file_of_the_folder_is_one_fix_that_has_its_name() -> None:
    files = {found.name for found in pkgutil.iter_modules(fixes.__path__)}
    assert {name.replace("_", "-") for name in files - {"shapes"}} == set(CATALOGUE)


@EVERY
def test_the_record(fix: Fix) -> None:
    assert CATALOGUE[fix.id] is fix
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", fix.id)
    for text, longest in ((fix.summary, 120), (fix.symptom, 110), (fix.affects, 120)):
        assert 0 < len(text) <= longest, text
        assert "\n" not in text, text
    assert not fix.cost.startswith("none"), "if the fix has no cost, leave `cost` empty"
    assert fix.group in GROUPS
    assert not fix.summary.endswith(".")
    assert fix.upstream or "\n\nUpstream: none yet" in str(module(fix).__doc__), (
        "add the upstream link to the fix, or write `Upstream: none yet` in its docstring"
    )
    assert all(re.fullmatch(r"https://github\.com/NVIDIA/[\w-]+/(pull|issues)/\d+", link) for link in fix.upstream)
    assert Version(OLDEST) <= Version(fix.since) < Version(fix.merged or "3.0")
    assert set(fix.requires) <= set(CATALOGUE) - {fix.id}


@EVERY
def test_the_file_says_what_it_is_about(fix: Fix) -> None:
    text = str(module(fix).__doc__)
    title, upstream, account = text.split("\n\n", 2)
    assert "\n" not in title
    assert title.startswith("Bug: ")
    assert title.endswith(".")
    assert upstream.startswith("Upstream: ")
    assert account
    assert "Symptom" not in text, "move the symptom from the docstring to the fix's `symptom`"


@EVERY
def test_the_file_imports_neither_torch_nor_te(fix: Fix) -> None:
    lines = Path(str(module(fix).__file__)).read_text().splitlines()
    assert not [line for line in lines if re.match(r"(import|from) (torch|transformer_engine)\b", line)]


@EVERY
def test_an_empty_te_is_never_edited(fix: Fix, tmp_path: Path) -> None:
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    verdict = fix.assess(Source.at(tmp_path))
    assert verdict.verdict in (Verdict.UNRECOGNIZED, Verdict.NOT_APPLICABLE)
    assert not verdict.edits


@pytest.mark.parametrize("version", ["2.12.0", "2.12.0+5671fd36", "2.12.0.dev0+abc", "2.12.0rc1"])
def test_local_labels_and_development_versions_count_as_their_release(version: str) -> None:
    assert CATALOGUE["warmup-reset"].expected(version) == Verdict.APPLICABLE
    assert CATALOGUE["warmup-reset"].expected(version.replace("2.12", "2.14")) == "not-needed"


@pytest.mark.parametrize("version", [None, "", "unknown"])
def test_an_unknown_version_leads_one_to_expect_nothing(version: str | None) -> None:
    assert CATALOGUE["warmup-reset"].expected(version) is None


def module(fix: Fix) -> object:
    return importlib.import_module(f"te_graph_fixes.fixes.{fix.id.replace('-', '_')}")
