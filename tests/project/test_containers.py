"""The figures of `docs/containers.md`: what the published TransformerEngine (TE) of each version needs.

``python -m tests.project.test_containers`` writes them.
"""

from __future__ import annotations

import re
from pathlib import Path

from te_graph_fixes.fixes import CATALOGUE
from tests.support.published import needed

PAGE = Path(__file__).parents[2] / "docs" / "containers.md"
CONTAINERS = ("2.12.0", "2.14.0", "2.16.0", "2.17.1", "2.18.0")
"""The releases of which NeMo's containers hold builds."""


def as_made(page: str) -> str:
    """The page with its table, and with the figures of what it shows of 2.14.0."""
    found = needed("2.14.0")
    fixes, modules = len(found), len({name for verdict in found.values() for name in verdict.targets})
    for version in CONTAINERS:
        count = f"{len(needed(version))} of {len(CATALOGUE)}"
        page = re.sub(rf"(\| {re.escape(version)}\+[^|]* \|) [^|]* \|", rf"\1 {count} |", page)
    answer = f"of {len(CATALOGUE)} known defects, {fixes} can be corrected"
    page = re.sub(r"of \d+ known defects, \d+ can be corrected", answer, page)
    page = re.sub(r"\d+ fixes(?= are now in| are in |,\n *corrected on disk)", f"{fixes} fixes", page)
    return re.sub(r"\b\d+ modules(?=\. Undo)", f"{modules} modules", page)


def test_the_page_is_what_the_sources_say() -> None:
    page = PAGE.read_text()
    assert as_made(page) == page, "run `python -m tests.project.test_containers`"


def test_no_page_installs_the_package_from_an_index() -> None:
    """It is on none: the command would fail, or install somebody else's."""
    for page in [*PAGE.parent.rglob("*.md"), *PAGE.parent.parent.glob("*.md")]:
        blocks = re.findall(r"```.*?```|(?<!`)`[^`\n]+`", page.read_text(), re.DOTALL)
        commands = [
            block for block in blocks if re.search(r"(pip|uv)[^\n&]* (install|download)[^\n&]* te-graph-fixes", block)
        ]
        assert not [command for command in commands if command != "`pip install te-graph-fixes`"], page
    assert "`pip install te-graph-fixes` fails" in PAGE.read_text()


def test_every_command_of_the_page_is_one() -> None:
    from te_graph_fixes.commands.cli import COMMANDS

    named = re.findall(r"`(?:te-graph-fixes|RUN te-graph-fixes) ([a-z]+)", PAGE.read_text())
    assert set(named) <= set(COMMANDS)


if __name__ == "__main__":
    PAGE.write_text(as_made(PAGE.read_text()))
