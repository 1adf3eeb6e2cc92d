"""The pages about installing and starting the package: images.md, install.md, launchers.md."""

from __future__ import annotations

import re

import pytest

from te_graph_fixes.commands.cli import COMMANDS
from tests.support.child import ROOT, python
from tests.support.published import needed, source

DOCS = ROOT / "docs"


def test_no_page_installs_the_package_from_an_index() -> None:
    """The package is on no index, so the command would fail, or install an unrelated package."""
    for page in [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]:
        blocks = re.findall(r"```.*?```|(?<!`)`[^`\n]+`", page.read_text(), re.DOTALL)
        commands = [
            block for block in blocks if re.search(r"(pip|uv)[^\n&]* (install|download)[^\n&]* te-graph-fixes", block)
        ]
        assert not [command for command in commands if command != "`pip install te-graph-fixes`"], page
    assert "`pip install te-graph-fixes` fails" in (DOCS / "install.md").read_text()


@pytest.mark.parametrize("name", ["images.md", "install.md", "launchers.md"])
def test_every_command_exists(name: str) -> None:
    named = re.findall(r"`(?:te-graph-fixes|RUN te-graph-fixes) ([a-z]+)", (DOCS / name).read_text())
    assert set(named) <= set(COMMANDS)


def test_images_shows_the_figures_of_nemo_26_04() -> None:
    """Its TE is a build of 2.14.0. The test reads PyPI's 2.14.0 instead."""
    page = (DOCS / "images.md").read_text()
    verdicts = needed("2.14.0")
    modules = {name for verdict in verdicts.values() for name in verdict.targets}
    summary = python("-m", "te_graph_fixes", "status", path=source("2.14.0")).stdout.splitlines()[0]
    assert f"$ te-graph-fixes status\n{summary.replace('2.14.0', '2.14.0+71bbefbf')}\n" in page
    assert re.search(rf"\b{len(verdicts)} fixes\b.*\b{len(modules)} modules", page)
