"""A harmless edit of TransformerEngine (TE) never costs a correction, in whatever function it is.

Every kind of edit is made at all places of the modules that the fixes read, and then the fixes have to say what they
say of TE itself. What they make, less the edits, is what they make of TE itself.
"""

from __future__ import annotations

import ast
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator
from difflib import unified_diff
from typing import TypeAlias

import pytest

from te_graph_fixes.engine import patched
from te_graph_fixes.settings import Settings
from te_graph_fixes.source import ModuleSource, Source
from te_graph_fixes.verdicts import Decision
from tests.published import examined

VERSIONS = [
    *(pytest.param(version, marks=pytest.mark.slow) for version in ("2.10.0", "2.15.0", "2.17.1")),
    *("2.12.0", "2.20.2"),
]
Insertions: TypeAlias = "Iterator[tuple[int, str]]"
"""Character offsets, and what is put there. Each text has the word ``harmless``, which is not in TE."""


def functions(module: ModuleSource) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(module.tree) if isinstance(node, ast.FunctionDef)]


def bodies(module: ModuleSource) -> Iterator[list[ast.stmt]]:
    """Every list of statements inside of functions."""
    inside = {node for function in functions(module) for part in function.body for node in ast.walk(part)}
    for node in [*functions(module), *inside]:
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                yield body


def first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])


STATEMENTS = (
    "logging.getLogger(__name__).debug('harmless line')",
    "torch.cuda.nvtx.mark('harmless line')",
    "gc.collect()  # harmless line",
    "harmless = time.time()  # harmless line",
    "if os.environ.get('X'): print('harmless line')",
    "assert 'harmless line'",
    "import harmless  # harmless line",
)


def statements(module: ModuleSource) -> Insertions:
    """One of them in front of every other statement; docstrings stay where they are, and ``elif`` is no place."""
    following = itertools.cycle(STATEMENTS)
    for body in bodies(module):
        for node in body:
            line = module.line(first_line(node))
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not is_docstring and not line.lstrip().startswith("elif ") and is_alone(module, node):
                indent = line[: len(line) - len(line.lstrip())]
                yield module.starts[first_line(node)], f"{indent}{next(following)}\n"


def comments(module: ModuleSource) -> Insertions:
    for at, text in statements(module):
        yield at, text[: len(text) - len(text.lstrip())] + "# harmless line\n"


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
    for node in functions(module):
        taken = [*node.args.args, *node.args.defaults]
        if taken and not (node.args.vararg or node.args.kwonlyargs or node.args.kwarg):
            yield max(module.span(part)[1] for part in taken), ", harmless=None"


def decorators(module: ModuleSource) -> Insertions:
    for node in functions(module):
        yield module.starts[first_line(node)], f"{' ' * node.col_offset}@harmless  # harmless line\n"


def annotations(module: ModuleSource) -> Insertions:
    for node in functions(module):
        for parameter in [*node.args.args, *node.args.kwonlyargs]:
            if parameter.annotation is None and parameter.arg not in ("self", "cls", "ctx"):
                yield module.span(parameter)[1], ": 'harmless'"


def annotated_variables(module: ModuleSource) -> Insertions:
    shared = {
        name for node in ast.walk(module.tree) if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names
    }
    for body in bodies(module):
        for node in body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if len(targets) == 1 and isinstance(targets[0], ast.Name) and targets[0].id not in shared:
                yield module.span(targets[0])[1], ": 'harmless'"


def docstrings(module: ModuleSource) -> Insertions:
    for node in functions(module):
        if ast.get_docstring(node) is None and is_alone(module, node.body[0]) and node.body[0].lineno > node.lineno:
            yield module.starts[first_line(node.body[0])], f'{" " * node.body[0].col_offset}"""harmless line"""\n'


def beside_definitions(text: str) -> Callable[[ModuleSource], Insertions]:
    """Statements below every definition of the module and of its classes."""

    def kind(module: ModuleSource) -> Insertions:
        for node in module.definitions.values():
            yield module.starts[(node.end_lineno or 0) + 1], textwrap.indent(text, " " * node.col_offset)

    return kind


KINDS: dict[str, Callable[[ModuleSource], Insertions]] = {
    "statement": statements,
    "comment": comments,
    "comment behind": at_line_ends,
    "parameter": parameters,
    "decorator": decorators,
    "annotation": annotations,
    "annotated variable": annotated_variables,
    "docstring": docstrings,
    "module-level statement": beside_definitions("os.environ['harmless line'] = '1'\n"),
    "function": beside_definitions("def harmless():  # harmless line\n    return 1  # harmless line\n"),
}


def edited(tree: Source, kind: Callable[[ModuleSource], Insertions], names: set[str]) -> Source:
    result = Source(tree.location, tree.version)
    for name in tree._modules:
        module = tree.find(name)
        if module is not None and name in names:
            text = module.text
            for at, insertion in sorted(set(kind(module)), reverse=True):
                text = text[:at] + insertion + text[at:]
            compile(text, name, "exec", dont_inherit=True)
            module = ModuleSource(name, module.path, text, consulted=result.consulted)
        result._modules[name] = module
    return result


def made(decision: Decision) -> dict[str, str]:
    """The corrected texts, less what is harmless, and comments: those above a line that is deleted may stay."""
    texts = patched(decision.source, decision.to_apply.values())
    return {name: COMMENT.sub("", HARMLESS.sub("", after)) for name, (_, after) in texts.items()}


HARMLESS = re.compile(r"^.*harmless line.*\n|  # harmless$|, harmless=None|: 'harmless'", re.MULTILINE)
COMMENT = re.compile(r"^ *#.*\n", re.MULTILINE)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_harmless_edit_costs_no_correction(kind: str, version: str) -> None:
    tree, known = examined(version)
    names = {name for verdict in known.values() for name in (*verdict.targets, *(each for each, _ in verdict.rests_on))}
    decision = Decision(edited(tree, KINDS[kind], names), Settings())
    lost = {
        fix: f"{verdict.verdict}: {verdict.reason}"
        for fix, verdict in decision.decisions.items()
        if verdict.verdict != known[fix].verdict
    }
    assert not lost, "\n".join(f"{fix}: {reason}" for fix, reason in lost.items())
    texts = made(Decision(tree, Settings(), known))
    differences = [
        line
        for name, text in made(decision).items()
        for line in unified_diff(texts[name].splitlines(), text.splitlines(), name)
    ]
    assert not differences, "\n".join(differences[:20])
