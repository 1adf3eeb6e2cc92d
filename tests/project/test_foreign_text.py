"""Test that the repository contains at most five lines of code of TransformerEngine (TE) in a row."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

from tests.support.published import VERSIONS, source

ROOT = Path(__file__).parents[2]
LONGEST = 5
FOLDERS = ("te_graph_fixes", "tests", "tools", "docs", "examples", "upstream")


def lines(text: str) -> list[str]:
    """Return the lines that are neither blank nor comments, without whitespace."""
    found = ("".join(line.split()) for line in text.splitlines())
    return [line for line in found if line and not line.startswith("#")]


def runs(text: str) -> Iterator[tuple[str, ...]]:
    its = lines(text)
    return zip(*(itertools.islice(its, start, None) for start in range(LONGEST + 1)), strict=False)


@functools.cache
def texts_of_te() -> set[str]:
    covered = VERSIONS[VERSIONS.index("2.9.0") :]
    return {path.read_text() for version in covered for path in source(version).rglob("transformer_engine/**/*.py")}


def copied(texts: dict[str, str]) -> dict[str, list[str]]:
    """Return, by file, the first line of each run of more than five lines of TE; {} if there are none."""
    ours: dict[tuple[str, ...], list[str]] = {}
    for name, text in texts.items():
        for run in runs(text):
            ours.setdefault(run, []).append(name)
    found: dict[str, list[str]] = {}
    for text in texts_of_te():
        for run in runs(text):
            for name in ours.pop(run, ()):
                found.setdefault(name, []).append(run[0])
    return found


def test_no_run_of_lines_is_copied_from_te() -> None:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in [*paths, *ROOT.glob("*.md")]}
    assert len(texts) > 50
    assert not copied(texts)


def test_a_copy_is_detected() -> None:
    graph = (source(VERSIONS[-1]) / "transformer_engine" / "pytorch" / "graph.py").read_text().splitlines()
    start = graph.index("def set_capture_start() -> None:")
    copy = [f"    {line}" for line in graph[start : start + 20]]
    assert set(copied({"a.py": "\n".join(["# ours", *copy])})) == {"a.py"}
    assert not copied({"a.py": "\n".join(copy[:LONGEST])})
