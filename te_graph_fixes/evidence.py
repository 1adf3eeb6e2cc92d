"""That what a verdict rests on is what runs: without this, a corrected shape in a source proves nothing.

The modules of TransformerEngine (TE) define each function once and with decorators that keep it, run nothing at import
that could replace it, and hold no code that never runs. A source where this is otherwise is not recognised.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, cast
from weakref import proxy

from .source import Definition, ModuleSource, Source, unrecognized

_KEEP = {
    *("staticmethod", "classmethod", "property", "setter", "abstractmethod", "contextmanager", "dataclass"),
    *("no_grad", "no_torch_dynamo", "once_differentiable"),
}
"""The decorators of what verdicts rest on, which leave a function what it is."""

_REACH = {
    *("exec", "eval", "globals", "locals", "vars", "setattr", "delattr", "getattr", "__import__", "import_module"),
    *("__code__", "__dict__", "__setattr__", "modules"),
}
"""What can set anything at all."""

_SET = (
    r"\.{0}\b(?:\s*,[^()=\n]+)?(?:\s*:[^=\n]+)?\s*=(?!=)",
    r"global\s[\w, ]*\b{0}\b",
    r"setattr\([^()]*[\"']{0}[\"']",
)
"""How a function may set a name of its module, or of an object."""

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_TESTED: tuple[Any, ...] = (ast.If, ast.While, ast.IfExp)
_BLOCKS: tuple[Any, ...] = (ast.FunctionDef, ast.If, ast.For, ast.While, ast.With, ast.Try)


def require_plain(source: Source, rests_on: Iterable[tuple[str, str]]) -> None:
    """Raise `UnrecognizedError` unless these functions and classes, by module and name, are what their names run."""
    for name, qualname in sorted(rests_on):
        module = source.find(name)
        if module is not None:
            _Evidence.of(module).require(qualname)


class _Evidence:
    """What is known of one module, each fact found once."""

    def __init__(self, module: ModuleSource) -> None:
        self.module, self._alive, self._counts = module, set[str](), dict[str, Counter[str]]()

    @classmethod
    def of(cls, module: ModuleSource) -> _Evidence:
        found: _Evidence = module.notes.setdefault(cls, cls(proxy(module)))
        return found

    def require(self, qualname: str) -> None:
        """Raise `UnrecognizedError` unless the name is plainly defined, with all classes that it is in, or absent."""
        owner, _, name = qualname.rpartition(".")
        if owner:
            self.require(owner)
        node = self.module.definitions.get(qualname)
        if node is None and not re.search(rf"\b{name}\b", self.module.text):
            return
        bound = self._bound(owner)
        if node is None or bound[name] != 1 or bound["*"]:
            raise unrecognized(f"one definition of {qualname}", self.module.path, "none, several, or other uses of it")
        if qualname in self._alive:
            return
        others = [ast.unparse(each) for each in node.decorator_list if _last(each) not in _KEEP]
        if others:
            raise unrecognized(f"{qualname} with decorators that are known", self.module.path, ", ".join(others))
        if self._import:
            raise unrecognized("an import that replaces nothing", self.module.path, f"`{self._import}`")
        elsewhere = next((found for each in _SET if (found := re.search(each.format(name), self.module.text))), None)
        if elsewhere or name in self._given:
            raise unrecognized(f"no other use of {name}", self.module.path, elsewhere.group() if elsewhere else "one")
        if isinstance(node, ast.FunctionDef):
            _require_alive(Definition(self.module, qualname, node))
        self._alive.add(qualname)

    def _bound(self, owner: str) -> Counter[str]:
        """How often each name is set where the module, or a class, is defined."""
        if owner not in self._counts:
            holder = self.module.definitions.get(owner, self.module.tree)
            self._counts[owner] = Counter(map(_binds, _at_import(holder.body)))
        return self._counts[owner]

    @cached_property
    def _given(self) -> set[str]:
        """The names that calls are given as the module is imported."""
        calls = [node for node in self._imported if isinstance(node, ast.Call)]
        given = [part for call in calls for part in (*call.args, *call.keywords)]
        return {_root(node) for part in given for node in ast.walk(part)} - {""}

    @cached_property
    def _imported(self) -> list[Any]:
        return list(_at_import(self.module.tree.body, inside_classes=True))

    @cached_property
    def _import(self) -> str:
        """What may set any name as the module is imported, or serve one that it lacks; "" where there is nothing."""
        functions = {node.name for node in self.module.tree.body if isinstance(node, _FUNCTIONS[:2])}
        if "__getattr__" in functions:
            return "__getattr__"
        for node in self._imported:
            calls = [node.func] if isinstance(node, ast.Call) else getattr(node, "decorator_list", [])
            sets = isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load)
            if sets or _last(node) in _REACH or any(_root(call) in functions for call in calls):
                return ast.unparse(node)[:80]
        return ""


def _require_alive(function: Definition) -> None:
    """Raise `UnrecognizedError` where a part of the function never runs."""
    names = function.nodes(ast.Name)
    stored = Counter(node.id for node in names if not isinstance(node.ctx, ast.Load))
    stored.update(node.arg for node in function.nodes(ast.arg) for _ in range(2))
    assigned = function.nodes(ast.Assign) + [node for node in function.module.tree.body if isinstance(node, ast.Assign)]
    constants = {_root(node.targets[0]) for node in assigned if isinstance(node.value, ast.Constant)}
    constants -= {name for name, count in stored.items() if count > 1}
    loaded = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    methods = [each for node in function.nodes(ast.ClassDef) for each in node.body]
    dead: list[Any] = [node for kind in _TESTED for node in function.nodes(kind) if _is_settled(node.test, constants)]
    dead += [node for node in function.nodes(ast.For) if ast.unparse(node.iter) in ("()", "[]", "range(0)")]
    dead += [each for each in function.nodes(ast.FunctionDef) if each.name not in loaded and each not in methods]
    for node in [function.node, *(node for kind in _BLOCKS for node in function.nodes(kind))]:
        for body in (getattr(node, field, []) for field in ("body", "orelse", "finalbody")):
            dead += body[1:] if any(map(_jumps, body[:-1])) else []
    if dead:
        raise unrecognized("code that runs", function, f"some that does not: `{ast.unparse(dead[0])[:80]}`")


def undone(function: Definition) -> Iterator[ast.Name]:
    """The variables that are set, and then, with no use between, set again, deleted or emptied, whatever comes between.

    Those too that are set where the function imports them.
    """
    set_by: dict[int, tuple[list[Any], Any]] = {}
    for kind in (ast.Assign, ast.AugAssign, ast.Delete, ast.Expr):
        for body, place in function.module.places(function.node, kind):
            node: Any = body[place]
            if isinstance(node, ast.Expr):
                targets = [cast(Any, node.value).func.value] if _last(node.value) == "clear" else []
            else:
                targets = getattr(node, "targets", None) or [node.target]
            for target in targets:
                for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                    set_by[id(each)] = body, node
    imported = {each.asname or each.name for each in function.nodes(ast.alias)}
    last: dict[str, Any] = {}
    for name in function.nodes(ast.Name):
        body, statement = set_by.get(id(name), ([], None))
        before = last.get(name.id)
        if statement is None:
            if before is None or name.lineno > before.end_lineno:
                last.pop(name.id, None)
            continue
        undoes = not isinstance(statement, ast.AugAssign) and name.id != "_"
        if isinstance(statement, ast.Assign):
            undoes = undoes and all(_root(each) != name.id for each in ast.walk(statement.value))
        if undoes and before is not None and (not isinstance(statement, ast.Delete) or before in body):
            undoes = before.lineno >= body[0].lineno
        else:
            undoes = undoes and name.id in imported
        if undoes:
            yield name
        last[name.id] = None if isinstance(statement, ast.Delete) else statement


def _at_import(body: Iterable[ast.AST], inside_classes: bool = False) -> Iterator[Any]:
    """What runs where the statements of a module or class do, functions' bodies left out."""
    pending: list[Any] = list(body)
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, _FUNCTIONS):
            defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            pending += [*defaults, *getattr(node, "decorator_list", [])]
        elif isinstance(node, ast.ClassDef):
            pending += [*node.decorator_list, *node.bases, *node.keywords, *(node.body if inside_classes else [])]
        else:
            pending += ast.iter_child_nodes(node)


def _binds(node: Any) -> str:
    """The name that a node sets, or ""."""
    if isinstance(node, ast.Name):
        return "" if isinstance(node.ctx, ast.Load) else node.id
    if isinstance(node, ast.alias):
        return (node.asname or node.name).partition(".")[0]
    return str(getattr(node, "name", None) or "")


def _root(node: Any) -> str:
    """The name that an expression like ``name.attribute(...)`` begins with, or ""."""
    while isinstance(node, (ast.Attribute, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return str(getattr(node, "id", ""))


def _last(node: Any) -> str:
    """The last name of an expression like ``name.attribute(...)``, or ""."""
    node = node.func if isinstance(node, ast.Call) else node
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _is_settled(test: ast.expr, constants: set[str]) -> bool:
    """Whether a condition, or a part of it, is always the same."""
    if isinstance(test, (ast.BoolOp, ast.UnaryOp)):
        parts = test.values if isinstance(test, ast.BoolOp) else [test.operand]
        return any(_is_settled(part, constants) for part in parts)
    varies = any(isinstance(node, (ast.Name, ast.Call)) for node in ast.walk(test))
    return not varies or (isinstance(test, ast.Name) and test.id in constants)


def _jumps(node: ast.stmt) -> bool:
    """Whether nothing that follows a statement is run."""
    if isinstance(node, ast.If):
        return any(map(_jumps, node.body)) and any(map(_jumps, node.orelse))
    if isinstance(node, ast.With):
        return any(map(_jumps, node.body))
    return isinstance(node, (ast.Return, ast.Raise, ast.Continue, ast.Break))
