"""Test that no fix is ``not-needed`` in a TransformerEngine (TE) that contains only a part of the fix.

The edits are like mistakes in cherry-picks: an omitted edit, an omitted statement, or a wrong argument or condition.
The verdict must be ``applicable`` or ``unrecognized``.
"""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from dataclasses import replace

import pytest

from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.installation import patched
from te_graph_fixes.patching.patch import read
from te_graph_fixes.patching.source import ModuleSource, Source, UnrecognizedError, first_line
from te_graph_fixes.status import Verdict
from tests.support.published import VERSIONS, examined, needed

NEWEST = VERSIONS[-1]
LAYOUTS = ("2.12.0", NEWEST)


def with_texts(tree: Source, texts: dict[str, str]) -> Source:
    modules = {name: ModuleSource(name, name, text) for name, text in texts.items()}
    return Source(tree.location, tree.version, tree._modules | modules)


def require_not_negative(fix_id: str, tree: Source, where: str = "") -> None:
    verdict = CATALOGUE[fix_id].assess(tree)
    reason = f"{fix_id}: {verdict.verdict}: {verdict.reason} {where}"
    assert verdict.verdict in (Verdict.APPLICABLE, Verdict.UNRECOGNIZED), reason
    if verdict.verdict == Verdict.APPLICABLE:
        assert patched(tree, {"": verdict})


@pytest.mark.full
@pytest.mark.parametrize("version", [pytest.param("2.12.0", marks=pytest.mark.slow), NEWEST])
def test_a_correction_with_one_edit_left_out_is_not_said_to_be_whole(version: str) -> None:
    tree = examined(version)[0]
    for fix_id, verdict in needed(version).items():
        for left_out in verdict.edits if len(verdict.edits) > 1 else ():
            rest = replace(verdict, edits=tuple(edit for edit in verdict.edits if edit is not left_out))
            texts = {name: text for name, (_, text) in patched(tree, {"": rest}).items()}
            require_not_negative(fix_id, with_texts(tree, texts), f"without {left_out}")


def corrections() -> list[tuple[str, ModuleSource, ast.stmt]]:
    """Return (fix, module, statement) for each statement of the upstream fixes in the newest TE."""
    tree, verdicts = examined(NEWEST)
    parts = {}
    for fix_id, verdict in verdicts.items():
        if verdict.verdict != Verdict.NOT_NEEDED:
            continue
        for hunk in (
            hunk for text, _ in CATALOGUE[fix_id].corrected for ways in read(text) for hunk in ways if hunk.pattern
        ):
            definition = None
            with suppress(UnrecognizedError):
                definition = hunk.find(tree)
            for match in definition.matches(hunk.pattern) if definition else ():
                for statement in (innermost(definition.module, node) for node in match.nodes):
                    parts[fix_id, statement] = fix_id, definition.module, statement
    return [*parts.values()]


def innermost(module: ModuleSource, node: ast.AST) -> ast.stmt:
    start, end = module.span(node)
    statements = [(module.span(part), part) for part in ast.walk(module.tree) if isinstance(part, ast.stmt)]
    around = [part for (first, last), part in statements if first <= start and end <= last]
    return max(around, key=lambda part: part.lineno)


@pytest.mark.full
def test_upstreams_correction_less_a_statement_is_not_said_to_be_whole() -> None:
    tree = examined(NEWEST)[0]
    for fix_id, module, statement in corrections():
        begin, end = module.starts[first_line(statement)], module.starts[(statement.end_lineno or 0) + 1]
        text = f"{module.text[:begin]}{' ' * statement.col_offset}pass\n{module.text[end:]}"
        require_not_negative(fix_id, with_texts(tree, {module.name: text}), f"line {statement.lineno} of {module.name}")


GRAPH, EXPERTS = "transformer_engine.pytorch.graph", "transformer_engine.pytorch.module.grouped_linear"
IN_PART = [
    (*("backward-dw-hooks", GRAPH), r"(?<=isinstance\(module, )\w+(?=\)\s+and module.need_b)", "str"),
    (*("grouped-linear-skip-flag", EXPERTS), r"(?<=skip_fp8_weight_update=)\w+(?=,\s+cache_w)", "None"),
    (*("grouped-linear-skip-flag", EXPERTS), r"(?<=skip_fp8_weight_update=)\w+(?=,\s+save)", "None"),
    (*("grouped-linear-skip-flag", EXPERTS), r"(?<=skip_update_flag=)skip_fp8_weight_update", "None"),
    (*("none-outputs", GRAPH), r"o for o in outputs if .*(?=\))", "x for x in outputs if x.requires_grad"),
]
"""Edits that leave only a part of an upstream fix, each as fix, module, pattern, and replacement of the match."""


@pytest.mark.parametrize(("fix_id", "module", "pattern", "text"), IN_PART)
def test_upstreams_correction_in_part_is_not_said_to_be_whole(
    fix_id: str, module: str, pattern: str, text: str
) -> None:
    tree, verdicts = examined(NEWEST)
    assert verdicts[fix_id].verdict == Verdict.NOT_NEEDED
    after, count = re.subn(pattern, text, tree.module(module).text)
    assert count
    require_not_negative(fix_id, with_texts(tree, {module: after}))
