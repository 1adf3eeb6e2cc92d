"""Edits of a source that keep what it does, and change how it is written.

A fix that has found its defect in a source must not say of such an edit of it that all is well: see
`tests.test_evasions`. An evasion is made at a `Place`, and gives the new texts of modules by their names, or None where
there is nothing of its kind to edit.
"""

from __future__ import annotations

import ast
import copy
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from te_graph_fixes.source import ModuleSource

Texts: TypeAlias = "dict[str, str] | None"
Definition: TypeAlias = "ast.FunctionDef | ast.ClassDef"
ELSEWHERE = "transformer_engine.pytorch._elsewhere"
_JUMPS = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Global, ast.Nonlocal)


@dataclass(frozen=True)
class Place:
    """A statement, the list that it is in, and the function or class of the module's top level that both are in."""

    module: ModuleSource
    body: list[ast.stmt]
    index: int
    owners: tuple[Definition, ...]
    """From the module's top level inwards; the last one holds the statement."""

    @property
    def statement(self) -> Any:
        return self.body[self.index]

    def with_statements(self, *nodes: ast.stmt | str) -> Texts:
        """The module with others in the place of the statement; a text is already Python."""
        text = "\n".join(
            node if isinstance(node, str) else ast.unparse(ast.fix_missing_locations(node)) for node in nodes
        )
        return {self.module.name: replaced(self.module, self.statement, text)}


def first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])


def replaced(module: ModuleSource, node: ast.stmt, text: str) -> str:
    """The module's text with other text on the lines of a statement, indented as that is."""
    start, end = module.starts[first_line(node)], module.starts[(node.end_lineno or 0) + 1]
    return module.text[:start] + textwrap.indent(text, " " * node.col_offset) + "\n" + module.text[end:]


def below_imports(text: str, addition: str) -> str:
    """``text`` of a module with something added after its last import."""
    imports = [node for node in ast.parse(text).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    lines = text.splitlines(keepends=True)
    end = imports[-1].end_lineno or 0
    return "".join([*lines[:end], addition, "\n", *lines[end:]])


def at_end(text: str, addition: str) -> str:
    return f"{text}\n\n{addition}\n"


def places(module: ModuleSource, offset: int) -> Iterator[Place]:
    """The statement that the character ``offset`` is in, or which follows it, and those around it, the inmost first."""
    found: list[Place] = []

    def visit(body: list[ast.stmt], owners: tuple[Definition, ...]) -> None:
        for index, node in enumerate(body):
            if module.starts[first_line(node)] <= offset < module.starts[(node.end_lineno or 0) + 1]:
                if owners:
                    found.append(Place(module, body, index, owners))
                inner = (*owners, node) if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else owners
                for part in parts(node):
                    visit(part, inner)

    visit(module.tree.body, ())
    return reversed(found)


def parts(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements in a statement."""
    for field in ("body", "orelse", "finalbody"):
        if isinstance(getattr(node, field, None), list):
            yield getattr(node, field)
    for handler in getattr(node, "handlers", []):
        yield handler.body


def text_of(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node))


def block(header: str, *bodies: str) -> str:
    return header + ":\n" + textwrap.indent("\n".join(bodies), "    ")


def stored(node: ast.AST) -> list[str]:
    """The variables that a statement sets, what it defines inside itself left out."""
    found: dict[str, None] = {}

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = None
        elif isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp, ast.Lambda)):
            return
        else:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found[node.id] = None
            if isinstance(node, ast.alias):
                found[(node.asname or node.name).partition(".")[0]] = None
            for child in ast.iter_child_nodes(node):
                visit(child)

    visit(node)
    return list(found)


def jumps(node: ast.AST) -> bool:
    """Whether a statement cannot be moved into a function as it is."""
    return any(isinstance(each, _JUMPS) or "super" in ast.dump(each) for each in ast.walk(node) if each is not None)


def variables(function: ast.AST) -> set[str]:
    """All names that are set in a function or inside it."""
    found = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    return found | {name for node in ast.walk(function) if isinstance(node, ast.stmt) for name in stored(node)}


def is_simple(node: ast.stmt) -> bool:
    return isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Assert, ast.Delete))


class _Rewrite(ast.NodeTransformer):
    """Put another expression in the place of each that ``change`` takes."""

    def __init__(self, change: Callable[[Any], ast.expr | None]) -> None:
        self.change, self.count = change, 0

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.JoinedStr:
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        node = super().generic_visit(node)
        changed = self.change(node) if isinstance(node, ast.expr) else None
        self.count += changed is not None
        return changed or node


def rewritten(place: Place, change: Callable[[Any], ast.expr | None]) -> Texts:
    """The statement with other expressions, of which there must be one at least."""
    rewrite = _Rewrite(change)
    node = rewrite.visit(copy.deepcopy(place.statement))
    return place.with_statements(node) if rewrite.count else None


def expression(text: str, **parts: ast.expr) -> ast.expr:
    """The expression ``text``, with others in the places of names."""
    node = ast.parse(text, mode="eval").body
    return cast(ast.expr, _Rewrite(lambda node: parts.get(getattr(node, "id", ""))).visit(node))


# Kinds: a statement in something that changes nothing.


def around(header: str, footer: str = "", loop: bool = False) -> Callable[[Place], Texts]:
    def kind(place: Place) -> Texts:
        if loop and jumps(place.statement):
            return None
        return place.with_statements(block(header, text_of(place.statement)) + footer)

    return kind


def beside(text: str) -> Callable[[Place], Texts]:
    return lambda place: place.with_statements(text, place.statement)


def on_one_line(place: Place) -> Texts:
    return place.with_statements(f"pass; {text_of(place.statement)}") if is_simple(place.statement) else None


# Kinds: another way to say the same.


def swapped_branches(place: Place) -> Texts:
    node = place.statement
    if not isinstance(node, ast.If):
        return None
    test = node.test.operand if isinstance(node.test, ast.UnaryOp) else ast.UnaryOp(ast.Not(), node.test)
    return place.with_statements(ast.If(test, node.orelse or [ast.Pass()], node.body))


def nested_conditions(place: Place) -> Texts:
    node = place.statement
    if not isinstance(node, ast.If) or node.orelse or not isinstance(node.test, ast.BoolOp):
        return None
    if not isinstance(node.test.op, ast.And):
        return None
    first, *others = node.test.values
    rest = others[0] if len(others) == 1 else ast.BoolOp(ast.And(), others)
    return place.with_statements(ast.If(first, [ast.If(rest, node.body, [])], []))


def named_condition(place: Place) -> Texts:
    node = place.statement
    if not isinstance(node, ast.If):
        return None
    return place.with_statements(
        f"condition = {ast.unparse(node.test)}", ast.If(ast.Name("condition"), node.body, node.orelse)
    )


def conditional_expression(place: Place) -> Texts:
    node = copy.deepcopy(place.statement)
    if isinstance(node, (ast.If, ast.While)):
        node.test = ast.IfExp(node.test, ast.Constant(True), ast.Constant(False))
    elif getattr(node, "value", None):
        node.value = ast.IfExp(ast.Constant(True), node.value, ast.Constant(None))
    else:
        return None
    return place.with_statements(node)


def set_otherwise(place: Place, text: str) -> Texts:
    """The assignment to an attribute as ``text`` does it, with its ``owner``, ``name`` and ``value``."""
    node = place.statement
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
        return None
    target = node.targets[0]
    return place.with_statements(
        text.format(owner=ast.unparse(target.value), name=repr(target.attr), value=ast.unparse(node.value))
    )


def by_setattr(place: Place) -> Texts:
    return set_otherwise(place, "setattr({owner}, {name}, {value})")


def through_dict(place: Place) -> Texts:
    return set_otherwise(place, "vars({owner})[{name}] = {value}")


def by_getattr(place: Place) -> Texts:
    def change(node: ast.expr) -> ast.expr | None:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            return ast.Call(ast.Name("getattr"), [node.value, ast.Constant(node.attr)], [])
        return None

    return rewritten(place, change)


def single_target(node: ast.stmt) -> ast.expr | None:
    return node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None


def annotated(place: Place) -> Texts:
    target = single_target(place.statement)
    if target is None or isinstance(target, (ast.Tuple, ast.List)):
        return None
    return place.with_statements(f"{ast.unparse(target)}: object = {ast.unparse(place.statement.value)}")


def walrus(place: Place) -> Texts:
    target = single_target(place.statement)
    if not isinstance(target, ast.Name) or isinstance(place.owners[-1], ast.ClassDef):
        return None
    return place.with_statements(f"({target.id} := {ast.unparse(place.statement.value)})")


def two_targets(place: Place) -> Texts:
    target = single_target(place.statement)
    if target is None:
        return None
    return place.with_statements(f"{ast.unparse(target)} = same = {ast.unparse(place.statement.value)}")


def in_a_tuple(place: Place) -> Texts:
    target = single_target(place.statement)
    if target is None:
        return None
    text, value = ast.unparse(target), ast.unparse(place.statement.value)
    return place.with_statements(f"({text}), nothing = ({value}), None")


def named_value(place: Place) -> Texts:
    node = copy.deepcopy(place.statement)
    if getattr(node, "value", None) is None:
        return None
    text = ast.unparse(node.value)
    node.value = ast.Name("value")
    return place.with_statements(f"value = {text}", node)


def in_a_lambda(place: Place) -> Texts:
    node = copy.deepcopy(place.statement)
    if getattr(node, "value", None) is None or jumps(ast.Expr(node.value)):
        return None
    node.value = expression("(lambda: VALUE)()", VALUE=node.value)
    return place.with_statements(node)


def named_constants(place: Place) -> Texts:
    """Constants of the module for the constants in the statement."""
    values: dict[str, str] = {}

    def change(node: ast.expr) -> ast.expr | None:
        if isinstance(node, ast.Constant) and node.value is not Ellipsis:
            name = f"_CONSTANT_{len(values)}"
            values[name] = repr(node.value)
            return ast.Name(name)
        return None

    texts = rewritten(place, change)
    if not texts:
        return None
    return {
        name: below_imports(text, "\n".join(f"{name} = {value}" for name, value in values.items()))
        for name, text in texts.items()
    }


def joined_strings(place: Place) -> Texts:
    def change(node: ast.expr) -> ast.expr | None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 1:
            half = len(node.value) // 2
            return ast.BinOp(ast.Constant(node.value[:half]), ast.Add(), ast.Constant(node.value[half:]))
        return None

    return rewritten(place, change)


def other_comparisons(place: Place) -> Texts:
    turned = {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn}
    turned |= {ast.Gt: ast.LtE, ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.GtE: ast.Lt, ast.NotIn: ast.In}

    def change(node: ast.expr) -> ast.expr | None:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return ast.UnaryOp(ast.Not(), ast.Compare(node.left, [turned[type(node.ops[0])]()], node.comparators))
        return None

    return rewritten(place, change)


def unpacked_arguments(place: Place) -> Texts:
    def change(node: ast.expr) -> ast.expr | None:
        if not isinstance(node, ast.Call) or not (node.args or node.keywords):
            return None
        if any(isinstance(argument, ast.Starred) for argument in node.args):
            return None
        if any(keyword.arg is None for keyword in node.keywords):
            return None
        args: list[ast.expr] = [ast.Starred(ast.Tuple(node.args, ast.Load()), ast.Load())] if node.args else []
        names: list[ast.expr | None] = [ast.Constant(keyword.arg) for keyword in node.keywords]
        given = ast.Dict(names, [keyword.value for keyword in node.keywords])
        return ast.Call(node.func, args, [ast.keyword(None, given)] if names else [])

    return rewritten(place, change)


def other_literals(place: Place) -> Texts:
    """Calls for displays: ``dict()`` for ``{}``, ``list()`` for ``[]``, and what ``set()`` gives."""

    def change(node: ast.expr) -> ast.expr | None:
        for text, others in (("{}", "dict()"), ("[]", "list()"), ("()", "tuple()"), ("set()", "set([])")):
            if ast.unparse(node) == text and not isinstance(getattr(node, "ctx", None), ast.Store):
                return expression(others)
        return None

    return rewritten(place, change)


def augmented(place: Place) -> Texts:
    node = place.statement
    if not isinstance(node, ast.AugAssign):
        return None
    value = copy.deepcopy(node.target)
    value.ctx = ast.Load()
    return place.with_statements(ast.Assign([node.target], ast.BinOp(value, node.op, node.value)))


def match_statement(place: Place) -> Texts:
    node = place.statement
    if not isinstance(node, ast.If):
        return None
    cases = (("True", node.body), ("_", node.orelse or [ast.Pass()]))
    text = block(
        f"match bool({ast.unparse(node.test)})", *(block(f"case {name}", *map(text_of, body)) for name, body in cases)
    )
    return place.with_statements(text)


def chosen_from_a_dict(place: Place) -> Texts:
    node = place.statement
    if not isinstance(node, ast.If):
        return None
    functions = [body_function(place, "chosen", node.body), body_function(place, "other", node.orelse or [ast.Pass()])]
    if None in functions:
        return None
    call = f"{{True: chosen, False: other}}[bool({ast.unparse(node.test)})]()"
    return place.with_statements(*filter(None, functions), call)


def exit_stack(place: Place) -> Texts:
    node = place.statement
    if not isinstance(node, ast.With):
        return None
    entered = [expression("stack.enter_context(VALUE)", VALUE=item.context_expr) for item in node.items]
    lines = [
        f"{ast.unparse(item.optional_vars)} = {ast.unparse(call)}" if item.optional_vars else ast.unparse(call)
        for item, call in zip(node.items, entered, strict=True)
    ]
    return place.with_statements(
        block("with __import__('contextlib').ExitStack() as stack", *lines, *map(text_of, node.body))
    )


def named_context(place: Place) -> Texts:
    node = copy.deepcopy(place.statement)
    if not isinstance(node, ast.With):
        return None
    lines = [f"context_{number} = {ast.unparse(item.context_expr)}" for number, item in enumerate(node.items)]
    for number, item in enumerate(node.items):
        item.context_expr = ast.Name(f"context_{number}")
    return place.with_statements(*lines, node)


def partial_calls(place: Place) -> Texts:
    def change(node: ast.expr) -> ast.expr | None:
        if not isinstance(node, ast.Call) or ast.unparse(node.func) in ("super", "locals"):
            return None
        made = ast.Call(expression("__import__('functools').partial"), [node.func, *node.args], node.keywords)
        return ast.Call(made, [], [])

    return rewritten(place, change)


def by_attrgetter(place: Place) -> Texts:
    def change(node: ast.expr) -> ast.expr | None:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            return expression(f"__import__('operator').attrgetter({node.attr!r})(VALUE)", VALUE=node.value)
        return None

    return rewritten(place, change)


def computed_constants(place: Place) -> Texts:
    texts = {None: "{}.get(0)", True: "not 0", False: "not 1"}

    def change(node: ast.expr) -> ast.expr | None:
        if isinstance(node, ast.Constant) and any(node.value is value for value in texts):
            return expression(texts[node.value])
        return None

    return rewritten(place, change)


def same_object(place: Place) -> Texts:
    """The first object whose attribute is used, under another name."""
    node = copy.deepcopy(place.statement)
    uses = [each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name)]
    if not is_simple(node) or not uses:
        return None
    before = f"same_object = {ast.unparse(uses[0].value)}"
    uses[0].value = ast.Name("same_object")
    return place.with_statements(before, node)


# Kinds: loops.


def body_function(place: Place, name: str, statements: Sequence[ast.stmt], parameters: str = "") -> str | None:
    """A function inside the function with the statements as its body, and what they set declared in front of it."""
    if any(map(jumps, statements)) or isinstance(place.owners[-1], ast.ClassDef):
        return None
    names = sorted({name for node in statements for name in stored(node)} - {parameters})
    outer = [owner for owner in place.owners if isinstance(owner, ast.FunctionDef)]
    declared = {node.arg for owner in outer for node in ast.walk(owner.args) if isinstance(node, ast.arg)}
    before = "".join(f"{name} = {name} if {name!r} in locals() else None\n" for name in names if name not in declared)
    nonlocals = [f"nonlocal {', '.join(names)}"] if names else []
    return before + block(f"def {name}({parameters})", *nonlocals, *map(text_of, statements))


def loop_as_comprehension(place: Place) -> Texts:
    node = place.statement
    if not isinstance(node, ast.For) or not isinstance(node.target, ast.Name) or node.orelse:
        return None
    function = body_function(place, "once", node.body, node.target.id)
    if function is None:
        return None
    return place.with_statements(function, f"[once({node.target.id}) for {node.target.id} in {ast.unparse(node.iter)}]")


def loop_as_while(place: Place) -> Texts:
    node = place.statement
    if not isinstance(node, ast.For) or node.orelse:
        return None
    head = f"items = iter({ast.unparse(node.iter)})\nend = object()\n"
    loop = block(
        "while (item := next(items, end)) is not end", f"{ast.unparse(node.target)} = item", *map(text_of, node.body)
    )
    return place.with_statements(head + loop)


def loop_by_map(place: Place) -> Texts:
    node = place.statement
    if not isinstance(node, ast.For) or not isinstance(node.target, ast.Name) or node.orelse:
        return None
    function = body_function(place, "once", node.body, node.target.id)
    return function and place.with_statements(function, f"list(map(once, {ast.unparse(node.iter)}))")


def loop_over_a_list(place: Place) -> Texts:
    node = copy.deepcopy(place.statement)
    if not isinstance(node, ast.For):
        return None
    node.iter = expression("list(VALUE)", VALUE=node.iter)
    return place.with_statements(node)


# Kinds: moved into a function.


def into_inner_function(place: Place) -> Texts:
    function = body_function(place, "moved", [place.statement])
    return None if function is None else place.with_statements(function, "moved()")


def into_decorated_function(place: Place) -> Texts:
    function = body_function(place, "moved", [place.statement])
    if function is None:
        return None
    before, header, rest = function.partition("def moved(")
    return place.with_statements(before + "@(lambda function: function())\n" + header + rest)


def helper(place: Place, name: str) -> tuple[str, str, set[str]] | None:
    """A function for the module's top level that does what the statement does, the call of it, and its globals."""
    node = place.statement
    if jumps(node) or isinstance(place.owners[-1], ast.ClassDef):
        return None
    known, sets = variables(place.owners[0]), stored(node)
    loads = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
    elsewhere = {each.id for other in place.owners[0].body for each in ast.walk(other) if isinstance(each, ast.Name)}
    elsewhere |= {each.arg for each in ast.walk(place.owners[0]) if isinstance(each, ast.arg)}
    only_here = {name for name in sets if name not in elsewhere}
    parameters = ", ".join(sorted((loads & known) - only_here))
    results = f"return {', '.join(sets)}" if sets else "return None"
    function = block(f"def {name}({parameters})", text_of(node), results)
    call = f"{', '.join(sets)} = {name}({parameters})" if sets else f"{name}({parameters})"
    return function, call, loads - known


def into_helper(place: Place) -> Texts:
    found = helper(place, "_moved_helper")
    if found is None:
        return None
    function, call, _ = found
    texts = place.with_statements(call)
    return texts and {name: at_end(text, function) for name, text in texts.items()}


def into_another_module(place: Place) -> Texts:
    found = helper(place, "moved_helper")
    if found is None:
        return None
    function, call, used = found
    texts = place.with_statements(f"from {ELSEWHERE} import moved_helper", call)
    names = sorted(used & variables(place.module.tree))
    return texts and {
        **texts,
        ELSEWHERE: f"from {place.module.name} import {', '.join(names)}\n" * bool(names) + function,
    }


def into_rest(place: Place) -> Texts:
    """The statement and all that follow it in a function of their own."""
    rest = place.body[place.index :]
    last = rest[-1]
    ends = isinstance(last, ast.Return)
    function = body_function(place, "rest", rest[:-1] if ends else rest) if len(rest) > ends else None
    if function is None:
        return None
    call = "rest()\n" + text_of(last) if ends else "rest()"
    start = place.module.starts[first_line(rest[0])]
    end = place.module.starts[(last.end_lineno or 0) + 1]
    text = textwrap.indent(f"{function}\n{call}\n", " " * rest[0].col_offset)
    return {place.module.name: place.module.text[:start] + text + place.module.text[end:]}


# Kinds: a whole function or class, the one of the module's top level or one inside it.


def renamed(node: ast.AST, names: dict[str, str]) -> None:
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            each.id = names.get(each.id, each.id)
        elif isinstance(each, ast.arg):
            each.arg = names.get(each.arg, each.arg)
        elif isinstance(each, (ast.FunctionDef, ast.ClassDef)):
            each.name = names.get(each.name, each.name)
        elif isinstance(each, (ast.Nonlocal, ast.Global)):
            each.names = [names.get(name, name) for name in each.names]


def other_local_names(place: Place) -> Texts:
    """All variables of the outmost function renamed, its parameters left."""
    functions = [owner for owner in place.owners if isinstance(owner, ast.FunctionDef)]
    if not functions:
        return None
    node = copy.deepcopy(functions[0])
    parameters = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    keywords = {keyword.arg for call in calls for keyword in call.keywords}
    names = {name for part in node.body for name in variables(part)} - parameters - keywords
    for part in node.body:
        renamed(part, {name: f"v{number}" for number, name in enumerate(sorted(names))})
    return {place.module.name: replaced(place.module, functions[0], text_of(node))}


def other_helper_names(place: Place) -> Texts:
    """Everything renamed that the module defines or imports, what is public left: a name without an underscore."""
    tree = copy.deepcopy(place.module.tree)
    local = {each.arg for each in ast.walk(tree) if isinstance(each, ast.arg)}
    names = {}
    for number, node in enumerate(tree.body):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_"):
            names[node.name] = f"_h{number}"
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            for alias in node.names:
                if alias.name != "*" and (alias.asname or alias.name) not in local:
                    names[alias.asname or alias.name] = f"_{alias.name}_{number}"
                    alias.asname = f"_{alias.name}_{number}"
    renamed(tree, names)
    return {place.module.name: text_of(tree)}


def one_helper_name(place: Place) -> Texts:
    """The outmost function or class renamed, and with it all its uses in the module, if it is not public."""
    name = place.owners[0].name
    if not name.startswith("_"):
        return None
    tree = copy.deepcopy(place.module.tree)
    renamed(tree, {name: "_something_else"})
    return {place.module.name: text_of(tree)}


def inmost(place: Place) -> tuple[Definition | None, ast.FunctionDef] | None:
    """The method or function of the module's top level that the statement is in, and its class."""
    first, *others = place.owners
    if isinstance(first, ast.FunctionDef):
        return None, first
    return (first, others[0]) if others and isinstance(others[0], ast.FunctionDef) else None


def behind_a_thin_one(place: Place) -> Texts:
    found = inmost(place)
    if found is None:
        return None
    owner, function = found
    node = copy.deepcopy(function)
    node.name = f"_real_{function.name}"
    static = any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in function.decorator_list)
    if owner is None:
        thin = block(f"def {function.name}(*args, **kwargs)", f"return {node.name}(*args, **kwargs)")
    elif static:
        thin = block(
            f"@staticmethod\ndef {function.name}(*args, **kwargs)", f"return {owner.name}.{node.name}(*args, **kwargs)"
        )
    else:
        kept = "".join(f"@{text_of(each)}\n" for each in function.decorator_list if text_of(each) == "classmethod")
        thin = block(f"{kept}def {function.name}(self, *args, **kwargs)", f"return self.{node.name}(*args, **kwargs)")
    return {place.module.name: replaced(place.module, function, f"{text_of(node)}\n\n{thin}")}


def behind_an_alias(place: Place) -> Texts:
    outer = place.owners[0]
    node = copy.deepcopy(outer)
    node.name = f"_Real{outer.name}"
    return {place.module.name: replaced(place.module, outer, f"{text_of(node)}\n\n{outer.name} = {node.name}")}


def behind_a_partial(place: Place) -> Texts:
    found = inmost(place)
    if found is None or found[0] is not None:
        return None
    node = copy.deepcopy(found[1])
    node.name = f"_real_{node.name}"
    text = f"{text_of(node)}\n\nimport functools\n{found[1].name} = functools.partial({node.name})"
    return {place.module.name: replaced(place.module, found[1], text)}


def in_a_base_class(place: Place) -> Texts:
    found = inmost(place)
    if found is None or not isinstance(found[0], ast.ClassDef):
        return None
    owner, function = found
    base, node = copy.deepcopy(owner), copy.deepcopy(owner)
    base.name, base.body = f"_{owner.name}Base", [copy.deepcopy(function)]
    node.bases, node.keywords = [ast.Name(base.name)], []
    node.body = [each for each in node.body if getattr(each, "name", "") != function.name] or [ast.Pass()]
    return {place.module.name: replaced(place.module, owner, f"{text_of(base)}\n\n{text_of(node)}")}


def set_from_outside(place: Place) -> Texts:
    """A method that is a function of the module, put into the class below it."""
    found = inmost(place)
    if found is None or found[0] is None or "super" in ast.dump(found[1]):
        return None
    owner, function = found
    node, method = copy.deepcopy(owner), copy.deepcopy(function)
    node.body = [each for each in node.body if getattr(each, "name", "") != function.name] or [ast.Pass()]
    method.name = f"_{owner.name}_{function.name}"
    text = f"{text_of(node)}\n\n{text_of(method)}\n\n{owner.name}.{function.name} = {method.name}"
    return {place.module.name: replaced(place.module, owner, text)}


def from_another_module(place: Place) -> Texts:
    outer = place.owners[0]
    names = {each.id for each in ast.walk(outer) if isinstance(each, ast.Name)} & variables(place.module.tree)
    imports = f"from {place.module.name} import {', '.join(sorted(names - {outer.name}) or ['__name__'])}\n"
    text = replaced(place.module, outer, f"from {ELSEWHERE} import {outer.name}")
    return {place.module.name: text, ELSEWHERE: imports + text_of(outer)}


def defined_under_a_condition(place: Place) -> Texts:
    outer = place.owners[0]
    return {place.module.name: replaced(place.module, outer, block("if __name__", text_of(outer)))}


def decorated(place: Place) -> Texts:
    found = inmost(place)
    if found is None:
        return None
    text = f"@(lambda function: function)\n{text_of(found[1])}"
    return {place.module.name: replaced(place.module, found[1], text)}


def decorated_class(place: Place) -> Texts:
    outer = place.owners[0]
    if not isinstance(outer, ast.ClassDef):
        return None
    return {place.module.name: replaced(place.module, outer, f"@(lambda cls: cls)\n{text_of(outer)}")}


def other_defaults(place: Place) -> Texts:
    """Defaults that are constants of the module."""
    found = inmost(place)
    if found is None:
        return None
    node = copy.deepcopy(found[1])
    values = []
    for defaults in (node.args.defaults, node.args.kw_defaults):
        for index, default in enumerate(defaults):
            if default is not None:
                values.append(f"_DEFAULT_{len(values)} = {ast.unparse(default)}")
                defaults[index] = ast.Name(values[-1].partition(" ")[0])
    if not values:
        return None
    return {place.module.name: below_imports(replaced(place.module, found[1], text_of(node)), "\n".join(values))}


def body_in_inner_function(place: Place) -> Texts:
    found = inmost(place)
    if found is None or any(isinstance(each, (ast.Yield, ast.YieldFrom)) for each in ast.walk(found[1])):
        return None
    node = copy.deepcopy(found[1])
    text = block("def real()", *map(text_of, node.body)) + "\nreturn real()"
    names = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)} & {
        name for part in node.body for name in stored(part)
    }
    if names:
        text = text.replace("def real():\n", f"def real():\n    nonlocal {', '.join(sorted(names))}\n", 1)
    node.body = ast.parse("def f():\n" + textwrap.indent(text, "    ")).body[0].body  # type: ignore[attr-defined]
    return {place.module.name: replaced(place.module, found[1], text_of(node))}


def with_method_in(place: Place, other: str) -> tuple[str, str] | None:
    """The class without the method that the statement is in, and with a base ``other`` in front; and that base."""
    found = inmost(place)
    if found is None or not isinstance(found[0], ast.ClassDef):
        return None
    owner, function = found
    node = copy.deepcopy(owner)
    node.bases = [ast.Name(other), *node.bases]
    node.body = [each for each in node.body if getattr(each, "name", "") != function.name] or [ast.Pass()]
    return text_of(node), block(f"class {other}", text_of(function))


def in_a_mixin(place: Place) -> Texts:
    found = with_method_in(place, "_Mixin")
    if found is None:
        return None
    text = replaced(place.module, place.owners[0], f"from {ELSEWHERE} import _Mixin\n\n{found[0]}")
    return {place.module.name: text, ELSEWHERE: f"from {place.module.name} import *\n\n{found[1]}"}


def in_a_subclass(place: Place) -> Texts:
    outer = place.owners[0]
    if not isinstance(outer, ast.ClassDef):
        return None
    node = copy.deepcopy(outer)
    node.name = f"_{outer.name}Impl"
    text = block(f"class {outer.name}({node.name})", "pass")
    return {place.module.name: replaced(place.module, outer, f"{text_of(node)}\n\n{text}")}


def made_by_a_function(place: Place) -> Texts:
    outer = place.owners[0]
    maker = block(f"def _make_{outer.name}()", text_of(outer), f"return {outer.name}")
    return {
        place.module.name: replaced(place.module, outer, f"{maker}\n\n{outer.name} = _make_{outer.name}()"),
    }


def re_exported(place: Place) -> Texts:
    """The whole module elsewhere, and all of its names in its place."""
    names = [node.name for node in place.module.tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return {
        place.module.name: f"from {ELSEWHERE} import *\nfrom {ELSEWHERE} import {', '.join(names)}\n",
        ELSEWHERE: place.module.text,
    }


def served_on_demand(place: Place) -> Texts:
    outer = place.owners[0]
    texts = from_another_module(place)
    assert texts
    getter = block("def __getattr__(name)", f"from {ELSEWHERE} import {outer.name}", f"return {outer.name}")
    return {**texts, place.module.name: replaced(place.module, outer, getter)}


def options_as_dict(place: Place) -> Texts:
    """The parameters with defaults are taken from ``**options``."""
    found = inmost(place)
    if found is None or found[1].args.kwarg or not found[1].args.defaults:
        return None
    node = copy.deepcopy(found[1])
    args, count = node.args, len(node.args.defaults)
    given = [*zip(args.args[-count:], args.defaults, strict=True), *zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    values = [f"{each.arg!r}, {ast.unparse(value)}" if value else repr(each.arg) for each, value in given]
    lines = [f"{each.arg} = options.pop({value})" for (each, _), value in zip(given, values, strict=True)]
    args.args, args.defaults, args.kwonlyargs, args.kw_defaults = args.args[:-count], [], [], []
    args.kwarg = ast.arg("options")
    node.body = [*ast.parse("\n".join(lines)).body, *node.body]
    return {place.module.name: replaced(place.module, found[1], text_of(node))}


def thin_inner_function(place: Place) -> Texts:
    inner = [owner for owner in place.owners[1:] if isinstance(owner, ast.FunctionDef)]
    if not inner or any(isinstance(owner, ast.ClassDef) for owner in place.owners):
        return None
    node = copy.deepcopy(inner[-1])
    node.name = f"real_{node.name}"
    thin = block(f"def {inner[-1].name}(*args, **kwargs)", f"return {node.name}(*args, **kwargs)")
    return {place.module.name: replaced(place.module, inner[-1], f"{text_of(node)}\n{thin}")}


STATEMENTS: dict[str, Callable[[Place], Texts]] = {
    "in if True": around("if True"),
    "in try": around("try", "\nfinally:\n    pass"),
    "in a handler": around("try:\n    raise KeyError\nexcept KeyError"),
    "in finally": around("try:\n    pass\nfinally"),
    "in with": around("with __import__('contextlib').nullcontext()"),
    "in a loop of one": around("for _ in (None,)", loop=True),
    "after another statement": beside("assert True"),
    "on one line with another": on_one_line,
    "swapped branches": swapped_branches,
    "nested conditions": nested_conditions,
    "named condition": named_condition,
    "conditional expression": conditional_expression,
    "setattr": by_setattr,
    "__dict__": through_dict,
    "getattr": by_getattr,
    "annotated assignment": annotated,
    "walrus": walrus,
    "two targets": two_targets,
    "tuple assignment": in_a_tuple,
    "named value": named_value,
    "lambda": in_a_lambda,
    "named constants": named_constants,
    "joined strings": joined_strings,
    "not moved": other_comparisons,
    "unpacked arguments": unpacked_arguments,
    "other literals": other_literals,
    "written out assignment": augmented,
    "loop as comprehension": loop_as_comprehension,
    "loop as while": loop_as_while,
    "loop over a list": loop_over_a_list,
    "loop by map": loop_by_map,
    "match": match_statement,
    "chosen from a dict": chosen_from_a_dict,
    "exit stack": exit_stack,
    "named context": named_context,
    "partial calls": partial_calls,
    "attrgetter": by_attrgetter,
    "computed constants": computed_constants,
    "same object": same_object,
    "inner function": into_inner_function,
    "decorated function": into_decorated_function,
    "helper function": into_helper,
    "helper in another module": into_another_module,
    "rest in a function": into_rest,
}
"""Kinds that edit one statement."""

DEFINITIONS: dict[str, Callable[[Place], Texts]] = {
    "other local names": other_local_names,
    "other names of helpers": other_helper_names,
    "another name": one_helper_name,
    "thin function": behind_a_thin_one,
    "alias": behind_an_alias,
    "partial": behind_a_partial,
    "base class": in_a_base_class,
    "mixin": in_a_mixin,
    "subclass": in_a_subclass,
    "made by a function": made_by_a_function,
    "re-exported": re_exported,
    "served on demand": served_on_demand,
    "options as a dict": options_as_dict,
    "thin inner function": thin_inner_function,
    "set from outside": set_from_outside,
    "from another module": from_another_module,
    "under a condition": defined_under_a_condition,
    "decorated": decorated,
    "decorated class": decorated_class,
    "other defaults": other_defaults,
    "body in an inner function": body_in_inner_function,
}
"""Kinds that edit a function or class."""
