"""An edit of TransformerEngine (TE) that keeps a defect, or takes a part of a correction back, never hides the defect.

The edits are those of cherry-picks: an edit left out, a condition turned round, upstream's correction in part. What a
fix says then is ``applicable`` or ``unrecognized``, never that all is well.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from te_graph_fixes.fix import SemanticPatch, Verdict
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.definition import Definition, UnrecognizedError
from te_graph_fixes.patching.installation import patched
from te_graph_fixes.patching.matching import extent
from te_graph_fixes.patching.patch import Hunk, read
from te_graph_fixes.patching.source import Edit, ModuleSource, Source, first_line
from te_graph_fixes.state import State
from tests.support.published import examined, needed, unset_names

VERSIONS = [
    *(pytest.param(version, marks=pytest.mark.slow) for version in ("2.10.0", "2.15.0", "2.17.1")),
    *("2.12.0", "2.20.2"),
]
NEWEST = [*(pytest.param(version, marks=pytest.mark.slow) for version in ("2.12.0", "2.15.0", "2.17.1")), "2.20.2"]
"""Those with corrections of upstream's."""


def turned_round(tree: Source, edits: Iterable[Edit]) -> Source:
    """TE with each condition turned round that an edit of a fix stands in, or that begins on its line."""
    lines = defaultdict[str, set[int]](set)
    for edit in edits:
        lines[edit.module].add(tree.module(edit.module).line_number(edit.start))
    texts = {}
    for name, edited in lines.items():
        root = ast.parse(tree.module(name).text)
        for node in ast.walk(root):
            if isinstance(node, ast.If) and edited.intersection(range(node.lineno, (node.end_lineno or 0) + 1)):
                node.test = ast.UnaryOp(ast.Not(), node.test)
        texts[name] = ast.unparse(ast.fix_missing_locations(root))
    return with_texts(tree, texts)


def with_texts(tree: Source, texts: dict[str, str]) -> Source:
    result = Source(tree.location, tree.version)
    for name in tree._modules.keys() | texts.keys():
        module = tree.find(name)
        text = texts.get(name, module.text if module else None)
        result._modules[name] = None if text is None else ModuleSource(name, name, text)
    return result


def require_not_negative(fix_id: str, tree: Source, where: str = "") -> Verdict:
    found = CATALOGUE[fix_id].verdict_on(tree)
    assert found.state in (State.APPLICABLE, State.UNRECOGNIZED), f"{fix_id}: {found.state}: {found.reason} {where}"
    if found.state == State.APPLICABLE:
        for before, after in patched(tree, {"": found}).values():
            assert unset_names(after) <= (unset_names(before) if before else set()), fix_id
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_a_condition_turned_round_does_not_hide_a_defect(version: str) -> None:
    tree, verdicts = examined(version)[0], needed(version)
    for fix_id, verdict in verdicts.items():
        require_not_negative(fix_id, turned_round(tree, verdict.edits))


def parts(version: str) -> Iterator[tuple[str, Edit, Source]]:
    """TE with all edits of a fix but one, and without a stamp."""
    tree = examined(version)[0]
    for fix_id, verdict in needed(version).items():
        for left_out in verdict.edits if len(verdict.edits) > 1 else ():
            rest = replace(verdict, edits=tuple(edit for edit in verdict.edits if edit is not left_out))
            yield (
                fix_id,
                left_out,
                with_texts(tree, {name: text for name, (_, text) in patched(tree, {"": rest}).items()}),
            )


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_correction_with_one_edit_left_out_is_not_said_to_be_whole(version: str) -> None:
    for fix_id, _, tree in parts(version):
        require_not_negative(fix_id, tree)


def corrections(version: str) -> list[tuple[str, str, ast.stmt]]:
    """Fix, module and statement of each part of upstream's corrections."""
    tree, verdicts = examined(version)
    parts = {}
    for fix_id, verdict in verdicts.items():
        examine = CATALOGUE[fix_id].examine
        if verdict.state != State.NOT_NEEDED or not isinstance(examine, SemanticPatch):
            continue
        for hunk in (hunk for text, _ in examine.corrected for ways in read(text) for hunk in ways if hunk.pattern):
            definition = found.pop() if (found := definitions(tree, hunk)) else None
            for match in definition.matches(hunk.pattern) if definition else ():
                statement = innermost(definition.module, match.node)
                parts[fix_id, definition.module.name, statement.lineno] = statement
    return [
        (fix_id, name, statement) for (fix_id, name, _), statement in sorted(parts.items(), key=lambda part: part[0])
    ]


def definitions(tree: Source, hunk: Hunk) -> list[Definition]:
    with suppress(UnrecognizedError):
        return [*filter(None, [hunk.find(tree)])]
    return []


def is_in(node: ast.AST, outer: ast.AST) -> bool:
    (start, end), (first, last) = extent(node), extent(outer)
    return first <= start and end <= last


def innermost(module: ModuleSource, node: ast.AST) -> ast.stmt:
    statements = [part for part in ast.walk(module.tree) if isinstance(part, ast.stmt) and is_in(node, part)]
    return max(statements, key=lambda part: part.lineno)


@pytest.mark.parametrize("version", NEWEST)
def test_upstreams_correction_less_a_statement_is_not_said_to_be_whole(version: str) -> None:
    tree = examined(version)[0]
    for fix_id, name, statement in corrections(version):
        module = tree.module(name)
        begin, end = module.starts[first_line(statement)], module.starts[(statement.end_lineno or 0) + 1]
        text = f"{module.text[:begin]}{' ' * statement.col_offset}pass\n{module.text[end:]}"
        require_not_negative(fix_id, with_texts(tree, {name: text}), f"line {statement.lineno} of {name}")


GRAPH, BASE = "transformer_engine.pytorch.graph", "transformer_engine.pytorch.module.base"
EXPERTS = "transformer_engine.pytorch.module.grouped_linear"
IN_PART = [
    (*("backward-dw-hooks", "2.20.2", GRAPH), r"(?<=isinstance\(module, )\w+(?=\)\s+and module.need_b)", "str"),
    (*("backward-dw-hooks", "2.20.2", GRAPH), r"(?<=te_modules = )visited_te_modules.get\(graph_idx, set\(\)\)", "()"),
    (*("grouped-linear-skip-flag", "2.20.2", EXPERTS), r"(?<=skip_fp8_weight_update=)\w+(?=,\s+cache_w)", "None"),
    (*("grouped-linear-skip-flag", "2.20.2", EXPERTS), r"(?<=skip_fp8_weight_update=)\w+(?=,\s+save)", "None"),
    (*("grouped-linear-skip-flag", "2.20.2", EXPERTS), r"(?<=skip_update_flag=)skip_fp8_weight_update", "None"),
    (*("none-outputs", "2.20.2", GRAPH), r"o for o in outputs if .*(?=\))", "x for x in outputs if x.requires_grad"),
    (*("param-grad-lifetime", "2.20.2", GRAPH), r"per_callable_returned_param_grad_clone_slots\[i\]", "[False] * 99"),
    (*("param-grad-lifetime", "2.20.2", GRAPH), r"(?<=\"skip_backward_post_hook\", )False", "True"),
    (
        *("warmup-reset", "2.20.2", GRAPH, r"(?=\n    graphed_callables = )"),
        "\n    post_warmup_hook = lambda: [setattr(m, 'is_first_microbatch', True) for m in modules]",
    ),
    (
        *("warmup-reset", "2.20.2", BASE, r"(?=\n    def prepare_forward\()"),
        "\n    def begin_anew(self):\n        self.is_first_microbatch = True\n",
    ),
]
"""Upstream's corrections in part: text in the place of what a pattern matches."""


@pytest.mark.parametrize(("fix_id", "version", "module", "pattern", "text"), IN_PART)
def test_upstreams_correction_in_part_is_not_said_to_be_whole(
    fix_id: str, version: str, module: str, pattern: str, text: str
) -> None:
    tree, verdicts = examined(version)
    assert verdicts[fix_id].state == State.NOT_NEEDED
    after, count = re.subn(pattern, text, tree.module(module).text)
    assert count
    require_not_negative(fix_id, with_texts(tree, {module: after}))
