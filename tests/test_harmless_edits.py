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
from pathlib import Path
from typing import TypeAlias

import pytest

import te_graph_fixes
from te_graph_fixes.engine import patched
from te_graph_fixes.settings import Settings
from te_graph_fixes.source import ModuleSource, Source
from te_graph_fixes.verdicts import Decision
from tests.published import examined

VERSIONS = [
    *(pytest.param(version, marks=pytest.mark.slow) for version in ("2.10.0", "2.15.0", "2.17.1")),
    *("2.12.0", "2.20.2"),
]
Kind: TypeAlias = "Callable[[ModuleSource], str]"
"""The text of a module after an edit."""
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
    "if os.environ.get('X'): raise RuntimeError('harmless line')",
    "torch.cuda.nvtx.range_push('harmless line')",
    "assert 'harmless line'",
    "import harmless  # harmless line",
    "with torch.cuda.nvtx.range('harmless line'): harmless = 1",
    "for harmless in (): print('harmless line')",
    "def harmless(): return 'harmless line'",
    "harmless, other_harmless = 1, 2  # harmless line",
    "os.environ['harmless line'] = '1'",
    "class Harmless: note = 'harmless line'",
    "harmless_is_on and print('harmless line')",
    "_ = 'harmless line'",
    "harmless_text: 'harmless line'",
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


def values_logged(module: ModuleSource) -> Insertions:
    """Behind each statement that sets a variable, a log of it."""
    for body in bodies(module):
        for node in body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and is_alone(module, node):
                log = f"logging.debug(f'harmless line {{{node.targets[0].id}.numel()}}')\n"
                yield module.starts[(node.end_lineno or 0) + 1], " " * node.col_offset + log


def branches(module: ModuleSource) -> Insertions:
    """An ``else`` that only logs, for every ``if`` that has none, but one that `wgrad-memory-reuse` replaces."""
    for body in bodies(module):
        for node in body:
            is_short = isinstance(node, ast.If) and not node.orelse and node.body[0].lineno > node.lineno
            if is_short and "if need_bwd_dw_graph[bwd_idx]:" not in module.line(node.lineno):
                text = f"{' ' * node.col_offset}else: print('harmless line')\n"
                yield module.starts[(node.end_lineno or 0) + 1], text


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
    """One more parameter with a default, which goes by its name where others do."""
    for node in functions(module):
        given = node.args
        parts = [*given.args, *given.defaults, given.vararg, *given.kwonlyargs, *given.kw_defaults]
        if any(parts):
            yield max(module.span(part)[1] for part in parts if part), ", harmless=None"


def positional_parameters(module: ModuleSource) -> Insertions:
    """One more parameter without a default."""
    for node in functions(module):
        given = node.args
        if given.args and not any((given.defaults, given.vararg, given.kwonlyargs, given.kwarg)):
            yield module.span(given.args[-1])[1], ", harmless"


def decorators(module: ModuleSource) -> Insertions:
    """Two more: around all others, and within them."""
    for node in functions(module):
        for line in (first_line(node), node.lineno):
            yield module.starts[line], f"{' ' * node.col_offset}@harmless  # harmless line {line}\n"


def annotations(module: ModuleSource) -> Insertions:
    for node in functions(module):
        for parameter in [*node.args.args, *node.args.kwonlyargs]:
            if parameter.annotation is None and parameter.arg not in ("self", "cls", "ctx"):
                yield module.span(parameter)[1], " : 'harmless'"


def results(module: ModuleSource) -> Insertions:
    """The annotation of what a function returns."""
    for node in functions(module):
        arguments = [each for each in ast.walk(node.args) if isinstance(each, (ast.arg, ast.expr))]
        end = max([module.span(node)[0], *(module.span(each)[1] for each in arguments)])
        if node.returns is None:
            yield module.text.index(")", end) + 1, " -> 'harmless'"


def annotated_variables(module: ModuleSource) -> Insertions:
    shared = {
        name for node in ast.walk(module.tree) if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names
    }
    for body in bodies(module):
        for node in body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            is_name = len(targets) == 1 and isinstance(targets[0], ast.Name) and targets[0].id not in shared
            if is_name or (len(targets) == 1 and isinstance(targets[0], ast.Attribute)):
                yield module.span(targets[0])[1], " : 'harmless'"


def docstrings(module: ModuleSource) -> Insertions:
    for node in functions(module):
        if ast.get_docstring(node) is None and is_alone(module, node.body[0]) and node.body[0].lineno > node.lineno:
            yield module.starts[first_line(node.body[0])], f'{" " * node.body[0].col_offset}"""harmless line"""\n'


def other_docstrings(module: ModuleSource) -> Insertions:
    for node in module.definitions.values():
        if ast.get_docstring(node) and module.text[at := module.span(node.body[0])[0]] == '"':
            yield at + 3, "harmless docstring "


def class_attributes(module: ModuleSource) -> Insertions:
    for node in module.definitions.values():
        if isinstance(node, ast.ClassDef):
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            yield module.starts[first_line(body[0])], f"{' ' * body[0].col_offset}harmless = 1  # harmless line\n"


def renamed(module: ModuleSource) -> Insertions:
    """Functions and variables that this package does not know by name, under other names."""
    own = {node.name for node in functions(module)} - WORDS
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef) and node.name in own:
            yield module.text.index(node.name, module.starts[node.lineno]) + len(node.name), "_harmless"
        elif (
            isinstance(node, (ast.Name, ast.Attribute))
            and (getattr(node, "id", "") or getattr(node, "attr", "")) in own
        ):
            yield module.span(node)[1], "_harmless"
    for function in module.definitions.values():
        nodes = [*ast.walk(function)] if isinstance(function, ast.FunctionDef) else []
        names = [node for node in nodes if isinstance(node, ast.Name)]
        fixed = {name for node in nodes if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names}
        fixed |= {node.arg for node in nodes if isinstance(node, ast.arg)} | WORDS | own
        stored = {node.id for node in names if isinstance(node.ctx, ast.Store)} - fixed
        yield from ((module.span(node)[1], "_harmless") for node in names if node.id in stored)


WORDS = {
    word
    for path in Path(te_graph_fixes.__file__).parent.glob("**/*.py")
    for word in re.findall(r"\w+", path.read_text())
}
"""All words in the text of this package."""


def beside_definitions(text: str) -> Callable[[ModuleSource], Insertions]:
    """Statements below every definition of the module and of its classes."""

    def kind(module: ModuleSource) -> Insertions:
        for node in module.definitions.values():
            yield module.starts[(node.end_lineno or 0) + 1], textwrap.indent(text, " " * node.col_offset)

    return kind


INSERTIONS: dict[str, Callable[[ModuleSource], Insertions]] = {
    "statement": statements,
    "comment": comments,
    "comment behind": at_line_ends,
    "parameter": parameters,
    "decorator": decorators,
    "annotation": annotations,
    "result": results,
    "annotated variable": annotated_variables,
    "docstring": docstrings,
    "other docstring": other_docstrings,
    "class attribute": class_attributes,
    "module-level statement": beside_definitions("os.environ['harmless line'] = '1'\n"),
    "import for types": beside_definitions("if TYPE_CHECKING: import harmless  # harmless line\n"),
    "function": beside_definitions("def harmless():  # harmless line\n    return 1  # harmless line\n"),
}


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
    """The module without comments, in other lines, and its functions behind everything else."""
    body = sorted(module.tree.body, key=lambda node: isinstance(node, ast.FunctionDef) and not node.decorator_list)
    return ast.unparse(ast.Module(body, []))


ALONE = {name: inserted(kind) for name, kind in INSERTIONS.items()}
KINDS: dict[str, Kind] = {
    "all insertions": inserted(*INSERTIONS.values()),
    "values logged": inserted(values_logged),
    "branch": inserted(branches),
    "positional parameter": inserted(positional_parameters),
    "renamed": inserted(renamed),
    "reformatted": reformatted,
}


def edited(tree: Source, kind: Kind, names: set[str]) -> Source:
    result = Source(tree.location, tree.version)
    for name in tree._modules:
        module = tree.find(name)
        if module is not None and name in names:
            text = kind(module)
            compile(text, name, "exec", dont_inherit=True)
            module = ModuleSource(name, module.path, text, consulted=result.consulted)
        result._modules[name] = module
    return result


def made(decision: Decision) -> dict[str, list[str]]:
    """The statements of the corrected modules, less what is harmless, in the order of the alphabet."""
    texts = patched(decision.source, decision.to_apply.values())
    return {name: sorted(map(ast.unparse, ast.parse(HARMLESS.sub("", text)).body)) for name, (_, text) in texts.items()}


HARMLESS = re.compile(
    r"^.*harmless line.*\n|  # harmless$|, harmless=None|, harmless\b| (->|:) 'harmless'|_harmless\b|"
    r"harmless docstring ",
    re.MULTILINE,
)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in ALONE)])
def test_a_harmless_edit_costs_no_correction(kind: str, version: str) -> None:
    tree, known = examined(version)
    names = {name for verdict in known.values() for name in (*verdict.targets, *(each for each, _ in verdict.rests_on))}
    decision = Decision(edited(tree, (KINDS | ALONE)[kind], names), Settings())
    lost = {
        fix: f"{verdict.verdict}: {verdict.reason}"
        for fix, verdict in decision.decisions.items()
        if verdict.verdict != known[fix].verdict
    }
    assert not lost, "\n".join(f"{fix}: {reason}" for fix, reason in lost.items())
    statements = made(Decision(tree, Settings(), known))
    differences = [
        line
        for name, found in made(decision).items()
        for line in unified_diff("\n".join(statements[name]).split("\n"), "\n".join(found).split("\n"), name)
    ]
    assert not differences, "\n".join(differences[:20])
