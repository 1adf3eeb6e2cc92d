"""An edit of TransformerEngine (TE) that keeps a defect, or takes a part of a correction back, never hides the defect.

The edits are those of vendors and of cherry-picks: a condition turned round, a helper in between, names changed, code
moved, a correction in part. What a fix says then is ``applicable`` or ``unrecognized``, never that all is well.
"""

from __future__ import annotations

import ast
import builtins
import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

import pytest

from te_graph_fixes.fix import APPLICABLE, NOT_NEEDED, UNRECOGNIZED, SemanticPatch, Verdict
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.patching.definition import UnrecognizedError
from te_graph_fixes.patching.installation import patched
from te_graph_fixes.patching.matching import extent
from te_graph_fixes.patching.patch import edits, read
from te_graph_fixes.patching.source import Edit, ModuleSource, Source, first_line
from tests.support.published import examined, needed, unset_names

VERSIONS = [
    *(pytest.param(version, marks=pytest.mark.slow) for version in ("2.10.0", "2.15.0", "2.17.1")),
    *("2.12.0", "2.20.2"),
]
NEWEST = [*(pytest.param(version, marks=pytest.mark.slow) for version in ("2.12.0", "2.15.0", "2.17.1")), "2.20.2"]
"""Those with corrections of upstream's."""


class Tree(ast.Module):
    """A module, and the functions that edits add to it at last."""

    helpers: list[ast.stmt]


Kind: TypeAlias = "Callable[[Tree, ast.AST], ast.AST | list[ast.AST] | None]"
"""What becomes of a node; None where it is not of this kind."""


def turned_condition(tree: Tree, node: ast.AST) -> ast.AST | None:
    """``if not condition: second; else: first``."""
    if not isinstance(node, ast.If):
        return None
    test = ast.UnaryOp(ast.Not(), node.test)
    return ast.If(test, node.orelse or [ast.Pass()], node.body)


def nested_condition(tree: Tree, node: ast.AST) -> ast.AST | None:
    if not (isinstance(node, ast.If) and isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)):
        return None
    if node.orelse:
        return None
    first, *rest = node.test.values
    inner = ast.If(ast.BoolOp(ast.And(), rest) if len(rest) > 1 else rest[0], node.body, [])
    return ast.If(first, [inner], [])


def named_value(tree: Tree, node: ast.AST) -> list[ast.AST] | None:
    if not isinstance(node, ast.Assign):
        return None
    name = ast.Name("named_value", ast.Load())
    return [ast.Assign([ast.Name("named_value", ast.Store())], node.value), ast.Assign(node.targets, name)]


def helper(tree: Tree, node: ast.AST) -> ast.AST | None:
    """A function of the module that runs the statement, or computes what is set."""
    if not isinstance(node, (ast.Expr, ast.For, ast.Assign)):
        return None
    moved = node.value if isinstance(node, ast.Assign) else node
    names = sorted({part.id for part in ast.walk(moved) if isinstance(part, ast.Name)} - set(dir(builtins)))
    made = ast.parse(f"def _helper_{len(tree.helpers)}({', '.join(names)}): pass").body[0]
    assert isinstance(made, ast.FunctionDef)
    made.body = [ast.Return(moved) if isinstance(moved, ast.expr) else moved]
    tree.helpers.append(made)
    call = ast.Call(ast.Name(made.name, ast.Load()), [ast.Name(name, ast.Load()) for name in names], [])
    return ast.Assign(node.targets, call) if isinstance(node, ast.Assign) else ast.Expr(call)


def switched(condition: str) -> Kind:
    """The statement in a condition that is new."""

    def kind(tree: Tree, node: ast.AST) -> ast.AST | None:
        if not isinstance(node, ast.stmt):
            return None
        return ast.If(ast.parse(condition, mode="eval").body, [node], [])

    return kind


def by_setattr(tree: Tree, node: ast.AST) -> ast.AST | None:
    if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)):
        return None
    target = node.targets[0]
    arguments = [target.value, ast.Constant(target.attr), node.value]
    return ast.Expr(ast.Call(ast.Name("setattr", ast.Load()), arguments, []))


def renamed_variables(tree: Tree, node: ast.AST) -> ast.AST | None:
    if not (isinstance(node, ast.FunctionDef) and node in tree.body):
        return None
    parameters = {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}
    stored = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    return renamed(node, {name: f"{name}_2" for name in stored - parameters})


def renamed_flags(tree: Tree, node: ast.AST) -> ast.AST | None:
    """Each attribute that is a flag, under another name."""
    if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node not in tree.body:
        return None
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and re.search(r"^is_|^skip_|^need", part.attr):
            part.attr += "_2"
        elif isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.startswith("is_"):
            part.value += "_2"
    return node


def thin_function(tree: Tree, node: ast.AST) -> list[ast.AST] | None:
    """A function that only calls the one that does the work."""
    if not (isinstance(node, ast.FunctionDef) and node in tree.body):
        return None
    thin = ast.parse(f"def {node.name}(*args, **kwargs):\n    return _real_{node.name}(*args, **kwargs)").body[0]
    node.name = f"_real_{node.name}"
    return [node, thin]


def from_another_module(tree: Tree, node: ast.AST) -> ast.AST | None:
    if not (isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node in tree.body):
        return None
    return ast.parse(f"from ._elsewhere import {node.name}").body[0]


def in_a_base_class(tree: Tree, node: ast.AST) -> list[ast.AST] | None:
    if not (isinstance(node, ast.ClassDef) and node in tree.body):
        return None
    base = copy.deepcopy(node)
    base.name = f"_{node.name}Base"
    node.bases, node.keywords, node.body = [ast.Name(base.name, ast.Load())], [], [ast.Pass()]
    return [base, node]


KINDS: dict[str, Kind] = {
    "condition turned round": turned_condition,
    "nested condition": nested_condition,
    "value with a name": named_value,
    "helper": helper,
    "switch": switched("os.environ.get('NVTE_AS_BEFORE', '1') == '1'"),
    "setattr": by_setattr,
    "renamed variables": renamed_variables,
    "renamed flags": renamed_flags,
    "thin function": thin_function,
    "from another module": from_another_module,
    "in a base class": in_a_base_class,
}


def renamed(node: Any, names: dict[str, str]) -> Any:
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            part.id = names.get(part.id, part.id)
        elif isinstance(part, (ast.Nonlocal, ast.Global)):
            part.names = [names.get(name, name) for name in part.names]
    return node


class Made(ast.NodeTransformer):
    """An edit at the nodes that begin on one of some lines, or at all that hold one of these."""

    def __init__(self, tree: Tree, kind: Kind, lines: set[int]) -> None:
        self.tree, self.kind, self.lines = tree, kind, lines
        self.count = 0

    def generic_visit(self, node: ast.AST) -> Any:
        made = None
        if isinstance(node, ast.stmt) and self.lines.intersection(range(node.lineno, (node.end_lineno or 0) + 1)):
            made = self.kind(self.tree, node)
        self.count += made is not None
        return super().generic_visit(node) if made is None else made


def edited(tree: Source, edits: Iterable[Edit], kind: Kind) -> Source:
    """TE with an edit wherever the fixes make one of their own."""
    places = defaultdict[str, set[int]](set)
    for edit in edits:
        line = tree.module(edit.module).text.count("\n", 0, edit.start) + 1
        places[edit.module] |= {line, line - 1}  # what is inserted stands below a statement
    texts, count = {}, 0
    for name, lines in places.items():
        syntax = Tree(ast.parse(tree.module(name).text).body, [])
        syntax.helpers = []
        change = Made(syntax, kind, lines)
        change.visit(syntax)
        syntax.body += syntax.helpers
        texts[name] = ast.unparse(ast.fix_missing_locations(ast.Module(syntax.body, [])))
        count += change.count
    assert count
    return with_texts(tree, texts)


def with_texts(tree: Source, texts: dict[str, str]) -> Source:
    result = Source(tree.location, tree.version)
    for name in tree._modules.keys() | texts.keys():
        module = tree.find(name)
        text = texts.get(name, module.text if module else None)
        result._modules[name] = None if text is None else ModuleSource(name, name, text)
    return result


def require_not_negative(fix_id: str, tree: Source, where: str = "") -> Verdict:
    found = CATALOGUE[fix_id].verdict(tree)
    assert found.verdict in (APPLICABLE, UNRECOGNIZED), f"{fix_id}: {found.verdict}: {found.reason} {where}"
    if found.verdict == APPLICABLE:
        for before, after in patched(tree, {"": found}).values():
            assert unset_names(after) <= (unset_names(before) if before else set()), fix_id
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_that_keeps_the_defects_does_not_hide_them(kind: str, version: str) -> None:
    tree, verdicts = examined(version)[0], needed(version)
    after = edited(tree, (edit for verdict in verdicts.values() for edit in verdict.edits), KINDS[kind])
    for fix_id in verdicts:
        require_not_negative(fix_id, after)


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


def corrections(version: str) -> set[tuple[str, str, ast.stmt]]:
    """Fix, module and statement of each part of upstream's corrections."""
    tree, verdicts = examined(version)
    parts = set()
    for fix_id, verdict in verdicts.items():
        examine = CATALOGUE[fix_id].examine
        if verdict.verdict == NOT_NEEDED and isinstance(examine, SemanticPatch):
            fitting = [text for text, _ in examine.corrected if fits(tree, text)]
            hunks = [hunk for text in fitting for ways in read(text) for hunk in ways]
            for hunk in hunks:
                with suppress(UnrecognizedError):
                    if (place := hunk._find(tree)) is not None:
                        matches = hunk._matches(place)
                        parts |= {(fix_id, place.module.name, innermost(place.module, each.node)) for each in matches}
    return parts


def fits(tree: Source, text: str) -> bool:
    with suppress(UnrecognizedError):
        return edits(tree, text) == []
    return False


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
    assert verdicts[fix_id].verdict == NOT_NEEDED
    after, count = re.subn(pattern, text, tree.module(module).text)
    assert count
    require_not_negative(fix_id, with_texts(tree, {module: after}))
