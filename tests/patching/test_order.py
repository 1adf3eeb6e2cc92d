"""Test that the names of fixes affect only the order of edits at one place, and only if no order is declared."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import replace

import pytest

from te_graph_fixes.fix import Assessment
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.installation import compile_patches, patched
from tests.support.published import COVERED, examined, needed


def renamed(verdicts: dict[str, Assessment]) -> dict[str, Assessment]:
    """Return the verdicts under names that sort in the reverse order."""
    names = dict(zip(sorted(verdicts), sorted(verdicts, reverse=True), strict=True))
    names = {old: f"renamed-{new}" for old, new in names.items()}
    return {
        names[old]: replace(verdict, after=tuple(names[other] for other in verdict.after if other in names))
        for old, verdict in verdicts.items()
    }


def words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+|[^\w\s]", text))


def statements(text: str) -> Counter[str]:
    """Return how often each statement without a body, and each item of a `with`, occurs in a module."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.stmt, ast.withitem))]
    return Counter(ast.dump(node) for node in nodes if not hasattr(node, "body"))


@pytest.mark.parametrize("version", COVERED)
def test_names_of_fixes_change_only_the_order_of_statements(version: str) -> None:
    tree, verdicts = examined(version)[0], needed(version)
    texts, others = patched(tree, verdicts), patched(tree, renamed(verdicts))
    assert texts.keys() == others.keys()
    for name, (_, text) in texts.items():
        assert words(others[name][1]) == words(text)
        assert statements(others[name][1]) == statements(text)
    assert compile_patches(tree, renamed(verdicts))


def test_declared_names_are_fixes() -> None:
    assert {name for fix in CATALOGUE.values() for name in fix.after} <= CATALOGUE.keys()
