"""The table and the figures of `docs/containers.md`: what the published TransformerEngine (TE) of each version needs.

``python -m tests.project.test_containers`` writes them.
"""

from __future__ import annotations

import re
from pathlib import Path

from te_graph_fixes.decision import verdicts
from te_graph_fixes.fix import APPLICABLE
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.source import Source
from tests.support.published import needed, source

PAGE = Path(__file__).parents[2] / "docs" / "containers.md"
CONTAINERS = {
    "2.12.0": "NeMo 26.02 (2.12.0+5671fd36)",
    "2.14.0": "NeMo 26.04 (2.14.0+71bbefbf)",
    "2.16.0": "NeMo 26.06, 26.06.01 (2.16.0+b9d690e0)",
    "2.17.1": "NeMo 26.08 (2.17.1+4329ff84)",
    "2.18.0": "NeMo 26.08.01 (2.18.0+15288857)",
}


def table() -> str:
    needs = {version: verdicts(Source.at(source(version))) for version in CONTAINERS}
    rows = [
        ["", *(f"{name}: TE {version}" for version, name in CONTAINERS.items())],
        ["---", *(":-:" for _ in CONTAINERS)],
        *(
            [f"`{fix}`", *("x" if found[fix].verdict == APPLICABLE else "" for found in needs.values())]
            for fix in CATALOGUE
        ),
    ]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def as_made(page: str) -> str:
    """The page with its table, and with the figures of what it shows of 2.14.0."""
    found = needed("2.14.0")
    fixes, files = len(found), len({name for verdict in found.values() for name in verdict.targets})
    page = re.sub(r"(?<=<!-- table -->\n)(\|.*\n)*", lambda _: table(), page)
    page = re.sub(r"\d+ of \d+ known defects; all \d+", f"{fixes} of {len(CATALOGUE)} known defects; all {fixes}", page)
    page = re.sub(r"\d+ fixes(?= are now in| are in |,\n *corrected on disk)", f"{fixes} fixes", page)
    return re.sub(r"\b\d+ files", f"{files} files", page)


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
