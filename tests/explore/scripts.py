"""A program as a script that a person reads: the driver for this program, less what it does not use."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from te_graph_fixes.checking import difference
from te_graph_fixes.verify import driver
from te_graph_fixes.verify.driver.program import Program

PARTS = [
    Path(__file__).with_name("alone.py"),
    *(
        Path(driver.__file__).with_name(f"{name}.py")
        for name in ("setting", "modules", "graphs", "training", "replays", "events", "comparison")
    ),
    Path(__file__).with_name("kinds.py"),
    Path(difference.__file__),
]
SET_HERE = ({"program"}, {"use"})
"""What the parts know the program by, of which a script has only the values."""
PURE = {"max": max, "min": min, "len": len, "any": any}


class Specialise(ast.NodeTransformer):
    """Put the values of a program's fields in, and leave branches out that are never taken."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if isinstance(node.value, ast.Name) and node.value.id == "program":
            return literal(getattr(self.program, node.attr))
        self.generic_visit(node)
        return node

    def fold(self, node: Any) -> ast.expr:
        self.generic_visit(node)
        try:
            return literal(eval(compile(ast.Expression(node), "", "eval"), {"__builtins__": PURE}))
        except (NameError, TypeError, ValueError, IndexError, AttributeError):
            return node

    visit_Compare = visit_UnaryOp = visit_Subscript = fold

    def visit_Call(self, node: ast.Call) -> ast.expr:
        pure = isinstance(node.func, ast.Name) and node.func.id in PURE
        return self.fold(node) if pure else self.generic_visit(node)  # type: ignore[return-value]

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        decides = isinstance(node.op, ast.Or)
        left = []
        for value in node.values:
            if not is_literal(value) or (value is node.values[-1] and not isinstance(value, ast.Constant)):
                left.append(value)
            elif bool(ast.literal_eval(value)) == decides:
                left.append(value)
                break
        if not left:
            return node.values[-1]
        return left[0] if len(left) == 1 else ast.BoolOp(node.op, left)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        if is_literal(node.test):
            return node.body if ast.literal_eval(node.test) else node.orelse
        return node

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        if is_literal(node.test):
            return node.body if ast.literal_eval(node.test) else node.orelse
        node.body = node.body or [ast.Pass()]
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(getattr(node, "body", None), list) and not node.body and not isinstance(node, ast.Module):
            node.body = [ast.Pass()]  # type: ignore[attr-defined]
        return node


def literal(value: Any) -> ast.expr:
    return ast.parse(repr(value), mode="eval").body


def is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def words(node: ast.AST) -> set[str]:
    """Every name in a piece of the program, and every string, which may name a definition."""
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    names |= {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    return names | {
        each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)
    }


def defined(node: ast.stmt) -> set[str]:
    """What a statement defines; nothing if it is kept in any case."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {each.asname or each.name.partition(".")[0] for each in node.names}
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
    return set()


def prune(body: list[ast.stmt], kept: set[str]) -> list[ast.stmt]:
    """The statements that are needed, with what ``kept`` says and what they need themselves."""
    while True:
        needed = [node for node in body if not defined(node) or defined(node) & kept]
        found = kept.union(*map(words, needed))
        if found == kept:
            return needed
        kept = found


def parts() -> ast.Module:
    """What runs a program, as one text: the parts, without what they import from each other, or again."""
    body: dict[str, ast.stmt] = {}
    for path in PARTS:
        for node in ast.parse(path.read_text()).body[1:]:
            of_driver = isinstance(node, ast.ImportFrom) and (node.level or node.module.startswith(driver.__name__))
            if not of_driver and defined(node) not in SET_HERE:
                body.setdefault(ast.unparse(node), node)
    imports = [node for node in body.values() if isinstance(node, (ast.Import, ast.ImportFrom))]
    main = [node for node in body.values() if isinstance(node, ast.If)]
    return ast.Module([*imports, *(node for node in body.values() if node not in imports + main), *main], [])


def script(program: Program, title: str = "") -> str:
    """The text of the script."""
    tree = ast.fix_missing_locations(Specialise(program).visit(parts()))
    text = ""
    while text != ast.unparse(tree):  # what one round leaves out may have been all that needed something else
        text = ast.unparse(tree)
        tree.body = prune(tree.body, {"train", "annotations", *(event.split()[0] for event in program.events)})
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in ("Captured", "Training"):
                others = set().union(*(words(each) for each in tree.body if each is not node))
                methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
                rest = [each for each in node.body if not isinstance(each, ast.FunctionDef)]
                node.body = [*rest, *prune(methods, others | {"__init__"})]
    return f'"""{title}\n\n{program}\n"""\n\n{text}\n'
