"""Sources that are almost TransformerEngine's (TE's): a fix makes the same change there, or says ``unrecognized``.

A mutation is made in the text near an edit. Then the fix on the mutated source must give what the mutation makes of the
fixed source; where the mutation is in the very text that the fix replaces, the fix must not apply.
"""

from __future__ import annotations

import ast
import bisect
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from te_graph_fixes.engine import patched
from te_graph_fixes.fix import APPLICABLE, UNRECOGNIZED
from te_graph_fixes.fixes import CATALOGUE
from te_graph_fixes.source import Edit, ModuleSource, Source
from tests.published import examined, needed

VERSIONS = ("2.12.0", "2.15.0", "2.20.2")
QUICK = ("2.12.0", "2.20.2")
FEW, MANY = 1, 31
NO_MUTATION = "no mutation"


@dataclass(frozen=True)
class Mutation:
    """Put other texts in place of spans of characters; or exchange two ``whole`` spans, or double the lines of one."""

    spans: tuple[tuple[int, int, str], ...] = ()
    whole: tuple[tuple[int, int], ...] = ()
    harmless: bool = False
    """Whether it may be in text that a fix replaces: a message."""


@dataclass(frozen=True)
class Function:
    """A function that a fix edits, and the offsets of the edits."""

    module: ModuleSource
    qualname: str
    edits: tuple[int, ...]

    @property
    def node(self) -> ast.AST:
        return self.module.definitions[self.qualname]

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.module.span(node)

    def pick(self, nodes: Sequence[ast.AST], rng: random.Random) -> ast.AST | None:
        """One of the nodes, rather near an edit than far from it."""
        found = sorted(nodes, key=lambda node: min(abs(self.span(node)[0] - edit) for edit in self.edits))
        return found[int(rng.expovariate(0.15)) % len(found)] if found else None


def names(function: Function, name: str) -> tuple[tuple[int, int, str], ...]:
    """Every place in the function that holds a variable's name."""
    found = []
    for node in ast.walk(function.node):
        if (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.arg) and node.arg == name):
            start, _ = function.span(node)
            found.append((start, start + len(name), f"{name}_renamed"))
    return tuple(found)


def rename(function: Function, rng: random.Random) -> Mutation | None:
    variables = [
        node
        for node in ast.walk(function.node)
        if (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.arg) and node.arg not in ("self", "cls", "ctx"))
    ]
    chosen = function.pick(variables, rng)
    return chosen and Mutation(names(function, chosen.id if isinstance(chosen, ast.Name) else chosen.arg))


def rename_parameter(function: Function, rng: random.Random) -> Mutation | None:
    assert isinstance(function.node, ast.FunctionDef)
    parameters = [node.arg for node in function.node.args.args if node.arg not in ("self", "cls", "ctx")]
    return Mutation(names(function, rng.choice(parameters))) if parameters else None


def statements(function: Function) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(function.node):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list):
                yield body


def double(function: Function, rng: random.Random) -> Mutation | None:
    chosen = function.pick([node for body in statements(function) for node in body], rng)
    return chosen and Mutation(whole=(function.span(chosen),))


def swap(function: Function, rng: random.Random) -> Mutation | None:
    following = {id(a): b for body in statements(function) for a, b in itertools.pairwise(body)}
    chosen = function.pick([node for body in statements(function) for node in body if id(node) in following], rng)
    return chosen and Mutation(whole=(function.span(chosen), function.span(following[id(chosen)])))


def expressions(function: Function) -> list[ast.AST]:
    """The nodes of the function, less those in formatted strings, whose places are known from Python 3.12 on only."""
    formatted = [node for node in ast.walk(function.node) if isinstance(node, ast.JoinedStr)]
    inside = {id(part) for node in formatted for part in ast.walk(node)}
    return [node for node in ast.walk(function.node) if id(node) not in inside]


def constant(function: Function, rng: random.Random) -> Mutation | None:
    constants = [
        node
        for node in expressions(function)
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, str, type(None)))
    ]
    chosen = function.pick(constants, rng)
    if not isinstance(chosen, ast.Constant):
        return None
    value = chosen.value
    if isinstance(value, bool):
        changed: object = not value
    elif value is None:
        changed = 0
    else:
        changed = value + (1 if isinstance(value, int) else "x")  # type: ignore[operator]
    return Mutation(((*function.span(chosen), repr(changed)),), harmless=isinstance(value, str) and " " in value)


def arguments(function: Function, rng: random.Random) -> Mutation | None:
    calls = [node for node in expressions(function) if isinstance(node, ast.Call) and (node.args or node.keywords)]
    chosen = function.pick(calls, rng)
    if not isinstance(chosen, ast.Call):
        return None
    given = sorted(map(function.span, [*chosen.args, *chosen.keywords]))
    if rng.random() < 0.5:
        end = given[-1][1]
        return Mutation(((end, end, ", added=None"),))
    start = given[-2][1] if len(given) > 1 else given[-1][0]
    return Mutation(((start, given[-1][1], ""),))


MUTATIONS: dict[str, Callable[[Function, random.Random], Mutation | None]] = {
    "renamed variable": rename,
    "renamed parameter": rename_parameter,
    "doubled statement": double,
    "moved statement": swap,
    "changed constant": constant,
    "other arguments": arguments,
}


def replaced(text: str, spans: Sequence[tuple[int, int, str]]) -> str:
    for start, end, new in sorted(spans, key=lambda span: span[:2], reverse=True):
        text = text[:start] + new + text[end:]
    return text


def exchanged(text: str, whole: Sequence[tuple[int, int]]) -> str:
    """``text`` with two spans exchanged, or the lines of one doubled."""
    (a, b), *others = whole
    if others:
        c, d = others[0]
        return text[:a] + text[c:d] + text[b:c] + text[a:b] + text[d:]
    line = text.rindex("\n", 0, a) + 1
    return text[:b] + "\n" + text[line:b] + text[b:]


def line_start(text: str, position: int) -> int:
    return text.rindex("\n", 0, position) + 1


def next_line(text: str, position: int) -> int:
    return text.index("\n", position) + 1


def accepted(text: str, edits: Sequence[Edit], mutation: Mutation) -> Iterator[str]:
    """The texts that a fix may give for the mutated source: the mutation of the text that it gives for ``text``.

    Lines that it inserts beside statements which are exchanged may go with either of them.
    """
    if mutation.spans:
        fixed = replaced(text, [(edit.start, edit.end, edit.text) for edit in edits])
        if not any(edit.start < end and start < edit.end for start, end, _ in mutation.spans for edit in edits):
            spans = [(*shifted(edits, start, end, insertions=start < end), new) for start, end, new in mutation.spans]
            yield replaced(fixed, spans)
        elif mutation.harmless:
            yield fixed
        return
    begin, end = line_start(text, mutation.whole[0][0]), next_line(text, mutation.whole[-1][1])
    while text.startswith("\n", end):
        end += 1  # what is inserted below a docstring stands behind the empty line
    loose = [
        edit for edit in edits if edit.start == edit.end and begin <= edit.start <= end and not inside(mutation, edit)
    ]
    tight = [edit for edit in edits if edit not in loose]
    fixed = replaced(text, [(edit.start, edit.end, edit.text) for edit in tight])
    for edit in tight:
        for start, stop in mutation.whole:
            if edit.start < stop and start < edit.end and not start <= edit.start <= edit.end <= stop:
                if not edit.text:
                    yield fixed  # it deletes the statement, with the comments above
                elif len(mutation.whole) == 1 and not text[stop : edit.end].strip():
                    again = (edit.end, edit.end, "\n" + text[line_start(text, start) : stop])
                    yield replaced(text, [*((each.start, each.end, each.text) for each in tight), again])
                return
    whole = [shifted(tight, start, stop) for start, stop in mutation.whole]
    result = exchanged(fixed, whole)
    first = line_start(result, whole[0][0])
    length = whole[0][1] - whole[0][0] if len(whole) == 1 else whole[1][1] - whole[1][0]
    last = next_line(result, whole[-1][1] if len(whole) == 2 else whole[0][1] + 1 + length)
    slots = [first, next_line(result, whole[0][0] + length), last]  # a docstring that is doubled has one below it
    for places in itertools.product(slots, repeat=len(loose)):
        yield replaced(result, [(place, place, edit.text) for place, edit in zip(places, loose, strict=True)])


def syntax(text: str) -> str | None:
    try:
        return ast.dump(ast.parse(text))
    except SyntaxError:
        return None


def inside(mutation: Mutation, edit: Edit) -> bool:
    return any(start < edit.start < end for start, end in mutation.whole)


def shifted(edits: Sequence[Edit], start: int, end: int, insertions: bool = True) -> tuple[int, int]:
    """A span of the original text in the fixed text; what is inserted at its start or end is not in it."""

    def shift(position: int, at: bool) -> int:
        before = [
            edit for edit in edits if edit.end < position or (edit.end == position and (at or edit.start < edit.end))
        ]
        return position + sum(len(edit.text) - (edit.end - edit.start) for edit in before)

    return shift(start, insertions), shift(end, False)


def functions(tree: Source, edits: Sequence[Edit]) -> list[Function]:
    """The functions that the edits are in."""
    found: dict[tuple[str, str], list[int]] = {}
    for edit in edits:
        module = tree.module(edit.module)
        for qualname, node in module.definitions.items():
            if isinstance(node, ast.FunctionDef):
                start, end = module.starts[node.lineno], module.starts[(node.end_lineno or 0) + 1]
                if start <= edit.start <= edit.end <= end:
                    found.setdefault((edit.module, qualname), []).append(edit.start)
    return [Function(tree.module(module), name, tuple(starts)) for (module, name), starts in found.items()]


def sets_of_its_own(name: str, before: Function, after: Function) -> bool:
    """Whether a fix adds a variable that only happens to have the name of one of TE's; a parameter is TE's."""

    def sets(node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)

    assert isinstance(before.node, ast.FunctionDef)
    if any(isinstance(node, ast.arg) and node.arg == name for node in ast.walk(before.node.args)):
        return False
    return sum(map(sets, ast.walk(after.node))) > sum(map(sets, ast.walk(before.node)))


def mutated(tree: Source, module: ModuleSource, text: str) -> Source:
    result = Source(tree.location, tree.version, tree.consulted)
    result._modules.update(tree._modules)
    result._modules[module.name] = ModuleSource(module.name, module.path, text, consulted=tree.consulted)
    return result


def check(fix_id: str, version: str, kind: str, seed: int) -> str:
    """What the fix says of one mutated source; fails if that, or what it does, is wrong."""
    fix, rng = CATALOGUE[fix_id], random.Random(seed)
    tree, verdict = examined(version)[0], examined(version)[1][fix_id]
    places = functions(tree, verdict.edits)
    assert places
    function = rng.choice(places)
    mutation = MUTATIONS[kind](function, rng)
    if mutation is None:
        return NO_MUTATION
    module = function.module
    text = replaced(module.text, mutation.spans) if mutation.spans else exchanged(module.text, mutation.whole)
    try:
        compile(text, module.path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return "no source"
    found = fix.verdict(mutated(tree, module, text))
    if found.verdict == UNRECOGNIZED:
        return UNRECOGNIZED
    start = (*mutation.spans, *mutation.whole)[0][0]
    where = f"{kind} at line {bisect.bisect(module.starts, start) - 1} of {module.path}"
    assert found.verdict == APPLICABLE, f"{where}: {found.verdict}: {found.reason}"

    after = {name: new for name, (_, new) in patched(mutated(tree, module, text), [found]).items()}
    wanted = {name: new for name, (_, new) in patched(tree, [verdict]).items()}
    edits = [edit for edit in verdict.edits if edit.module == module.name]
    if kind.startswith("renamed"):
        corrected = ModuleSource(module.name, module.path, wanted[module.name])
        name = module.text[slice(*mutation.spans[0][:2])]
        fixed = Function(corrected, function.qualname, (0,))
        choice = [replaced(corrected.text, names(fixed, name))]
        if sets_of_its_own(name, function, fixed):
            choice += accepted(module.text, edits, mutation)
    else:
        choice = list(accepted(module.text, edits, mutation))
    assert choice, f"{where}: applied although it is in the text that is replaced"
    assert syntax(after.pop(module.name)) in map(syntax, choice), f"{where}: not the same change"
    del wanted[module.name]
    assert after == wanted, where
    return APPLICABLE


NEEDED = [(fix_id, version) for version in VERSIONS for fix_id in needed(version)]


@pytest.mark.parametrize("kind", MUTATIONS)
@pytest.mark.parametrize(("fix_id", "version"), [pair for pair in NEEDED if pair[1] in QUICK])
def test_a_mutated_source(fix_id: str, version: str, kind: str) -> None:
    for seed in range(FEW):
        check(fix_id, version, kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MUTATIONS)
@pytest.mark.parametrize(("fix_id", "version"), NEEDED)
def test_many_mutated_sources(fix_id: str, version: str, kind: str) -> None:
    said = [check(fix_id, version, kind, seed) for seed in range(FEW, MANY)]
    if set(said) == {NO_MUTATION}:
        pytest.skip("there is nothing of this kind to mutate")
    assert {APPLICABLE, UNRECOGNIZED} & set(said)
