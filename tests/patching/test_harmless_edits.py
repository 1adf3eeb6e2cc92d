"""Test that harmless edits of TransformerEngine (TE), like the edits of vendors, disable no fix.

Each kind of edit is applied everywhere in the modules that the fixes change. The verdicts must not change.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest

from te_graph_fixes.fixes import assess
from te_graph_fixes.patching.source import ModuleSource, Source, first_line
from tests.support.published import VERSIONS, examined

Kind: TypeAlias = "Callable[[ModuleSource], str]"
"""A function that returns the text of a module after an edit."""
Insertions: TypeAlias = "Iterator[tuple[int, str]]"
"""Pairs of a character offset and a text to insert."""


def functions(module: ModuleSource) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(module.tree) if isinstance(node, ast.FunctionDef)]


def bodies(module: ModuleSource) -> Iterator[list[ast.stmt]]:
    """Yield every list of statements in the functions of a module, such as a body or an ``else`` branch."""
    inside = [node for function in functions(module) for part in function.body for node in ast.walk(part)]
    for node in dict.fromkeys([*functions(module), *inside]):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                yield body


def logs(module: ModuleSource) -> Insertions:
    """Yield edits that add a line of logging at the start of every function."""
    for node in functions(module):
        start = [part for part in node.body if not isinstance(part, ast.Expr) or part is not node.body[0]]
        if start and is_alone(module, start[0]) and start[0].lineno > node.lineno:
            yield module.starts[first_line(start[0])], f"{' ' * start[0].col_offset}logger.debug('harmless line')\n"


def nvtx_ranges(module: ModuleSource) -> Insertions:
    """Yield edits that add a profiler's range around each capture and each replay."""
    for node in captures_and_replays(module):
        indent, end = " " * node.col_offset, (node.end_lineno or 0) + 1
        yield module.starts[node.lineno], f"{indent}torch.cuda.nvtx.range_push('harmless line')\n"
        yield module.starts[end], f"{indent}torch.cuda.nvtx.range_pop()  # harmless line\n"


def captures_and_replays(module: ModuleSource) -> Iterator[ast.With | ast.Expr]:
    for body in bodies(module):
        for node in body:
            if isinstance(node, (ast.With, ast.Expr)) and re.search(
                r"_graph_context_wrapper\(|replay\(\)$", head(node)
            ):
                yield node


def head(node: ast.With | ast.Expr) -> str:
    return ", ".join(map(ast.unparse, node.items)) if isinstance(node, ast.With) else ast.unparse(node)


def comments(module: ModuleSource) -> Insertions:
    for body in bodies(module):
        for node in body:
            line = module.line(first_line(node))
            if not line.lstrip().startswith("elif ") and is_alone(module, node):
                yield module.starts[first_line(node)], line[: len(line) - len(line.lstrip())] + "# harmless line\n"


def is_alone(module: ModuleSource, node: ast.stmt) -> bool:
    line = module.line(first_line(node))
    return len(line) - len(line.lstrip()) == node.col_offset


def at_line_ends(module: ModuleSource) -> Insertions:
    for body in bodies(module):
        for node in body:
            end = module.starts[(node.end_lineno or 0) + 1] - 1
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) and "body" not in node._fields:
                yield end, "  # harmless"


def parameters(module: ModuleSource) -> Insertions:
    """Yield edits that add a parameter with a default to every function that has parameters."""
    for node in functions(module):
        given = node.args
        parts = [*given.args, *given.defaults, given.vararg, *given.kwonlyargs, *given.kw_defaults]
        if any(parts):
            yield max(module.span(part)[1] for part in parts if part), ", harmless=None"


def streams(module: ModuleSource) -> Insertions:
    """Yield edits that pass a stream to each capture."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_graph_context_wrapper":
            yield module.span([*node.args, *node.keywords][-1])[1], ", stream=harmless"


def decorators(module: ModuleSource) -> Insertions:
    """Yield edits that add two decorators to every function: one above and one below its own decorators."""
    for node in functions(module):
        for line in (first_line(node), node.lineno):
            yield module.starts[line], f"{' ' * node.col_offset}@harmless  # harmless line {line}\n"


def inserted(*kinds: Callable[[ModuleSource], Insertions]) -> Kind:
    def decorators_last(each: tuple[int, str]) -> tuple[int, bool, str]:
        return each[0], "@" in each[1], each[1]

    def kind(module: ModuleSource) -> str:
        text = module.text
        insertions = {each for kind in kinds for each in kind(module)}
        for at, insertion in sorted(insertions, key=decorators_last, reverse=True):
            text = text[:at] + insertion + text[at:]
        return text

    return kind


def reformatted(module: ModuleSource) -> str:
    """Return the module without comments, with other line breaks, and with its functions at the end."""
    body = sorted(module.tree.body, key=lambda node: isinstance(node, ast.FunctionDef) and not node.decorator_list)
    return ast.unparse(ast.Module(body, []))


KINDS: dict[str, Kind] = {
    "inserted": inserted(logs, nvtx_ranges, comments, at_line_ends, parameters, streams, decorators),
    "reformatted": reformatted,
}


def edited(tree: Source, kind: Kind, names: set[str]) -> Source:
    result = Source(tree.location, tree.version)
    for name in tree._modules:
        module = tree.find(name)
        if module is not None and name in names:
            text = kind(module)
            compile(text, name, "exec", dont_inherit=True)
            module = ModuleSource(name, module.path, text)
        result._modules[name] = module
    return result


@pytest.mark.parametrize("version", ["2.12.0", VERSIONS[-1]])
@pytest.mark.parametrize("kind", KINDS)
def test_a_harmless_edit_costs_no_correction(kind: str, version: str) -> None:
    tree, known = examined(version)
    names = {name for verdict in known.values() for name in verdict.targets}
    after = assess(edited(tree, KINDS[kind], names))
    lost = [f"{fix}: {found.reason}" for fix, found in after.items() if found.verdict != known[fix].verdict]
    assert not lost, "\n".join(lost)
