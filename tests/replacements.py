"""Edits of a source after which something else runs than the function, or the statement, that one sees in it.

Where a fix has found a correction, or that there is nothing to correct, it must not say so of such an edit: see
`tests.test_evasions`. An edit of a definition is given the module and the qualified name, and gives the new text.
"""

from __future__ import annotations

import ast
import copy
import textwrap
from collections.abc import Callable
from typing import cast

from te_graph_fixes.source import ModuleSource
from tests.evasions import ELSEWHERE, Definition, at_end, below_imports, block, replaced, text_of

OTHER = "def _other(*args, **kwargs):\n    raise NotImplementedError\n"
Kind = Callable[[ModuleSource, str], "str | None"]


def afterwards(for_names: str, for_methods: str | None = None) -> Kind:
    """Statements at the end of the module; for a ``{name}`` of it, or a ``{name}`` of the class ``{owner}``."""

    def kind(module: ModuleSource, qualname: str) -> str | None:
        owner, _, name = qualname.rpartition(".")
        text = for_methods if owner else for_names
        return text and at_end(module.text, OTHER + text.format(owner=owner, name=name, elsewhere=ELSEWHERE))

    return kind


def edited(module: ModuleSource, qualname: str, change: Callable[[Definition], ast.stmt | str | None]) -> str | None:
    node = module.definitions[qualname]
    made = change(copy.deepcopy(node))
    if made is None:
        return None
    text = replaced(module, node, made if isinstance(made, str) else text_of(made))
    return below_imports(text, OTHER)


def with_body(change: Callable[[str], str]) -> Kind:
    """Another body of a function, from the text of its own."""

    def changed(node: Definition) -> ast.stmt | None:
        if not isinstance(node, ast.FunctionDef) or ast.unparse(node.decorator_list[:1]).find("contextmanager") >= 0:
            return None
        body = "\n".join(map(text_of, node.body))
        made = cast(ast.FunctionDef, ast.parse("def f():\n" + textwrap.indent(change(body), "    ")).body[0])
        node.body = made.body
        return node

    return lambda module, qualname: edited(module, qualname, changed)


def decorated(decorator: str, above: str = "") -> Kind:
    def kind(module: ModuleSource, qualname: str) -> str | None:
        text = edited(module, qualname, lambda node: f"@{decorator}\n{text_of(node)}")
        return text and below_imports(text, above)

    return kind


def beside(statements: str) -> Kind:
    """Statements after the definition, at its own level."""
    return lambda module, qualname: edited(
        module, qualname, lambda node: f"{text_of(node)}\n{statements.format(name=node.name)}"
    )


def in_class(statements: str) -> Kind:
    """Statements that a class begins with; that of a method, or the class itself."""

    def kind(module: ModuleSource, qualname: str) -> str | None:
        owner, _, name = qualname.rpartition(".")
        node = module.definitions.get(owner)
        if not isinstance(node, ast.ClassDef):
            return None
        made = copy.deepcopy(node)
        made.body = [*ast.parse(statements.format(name=name)).body, *made.body]
        return below_imports(replaced(module, node, text_of(made)), OTHER)

    return kind


AGAIN = "def {name}(*args, **kwargs):\n    raise NotImplementedError"
REPLACEMENTS: dict[str, Kind] = {
    "assigned": afterwards("{name} = _other", "{owner}.{name} = _other"),
    "assigned with a type": afterwards("{name}: object = _other", "{owner}.{name}: object = _other"),
    "assigned in a tuple": afterwards("{name}, _nothing = _other, None", "{owner}.{name}, _nothing = _other, None"),
    "assigned by a walrus": afterwards("({name} := _other)", "[setattr({owner}, '{name}', _other)]"),
    "assigned by a loop": afterwards(
        "for {name} in (_other,):\n    pass", "for {owner}.{name} in (_other,):\n    pass"
    ),
    "assigned by with": afterwards("with memoryview(b'') as {name}:\n    pass"),
    "assigned under a condition": afterwards("if __name__:\n    {name} = _other", "if 1:\n    {owner}.{name} = _other"),
    "assigned through an alias": afterwards("", "_same = {owner}\n_same.{name} = _other"),
    "deleted": afterwards("del {name}", "del {owner}.{name}"),
    "globals": afterwards("globals()['{name}'] = _other", "globals()['{owner}'].{name} = _other"),
    "update": afterwards("globals().update({name}=_other)"),
    "setattr": afterwards(
        "import sys\nsetattr(sys.modules[__name__], '{name}', _other)", "setattr({owner}, '{name}', _other)"
    ),
    "exec": afterwards("exec('{name} = _other')", "exec('{owner}.{name} = _other')"),
    "code": afterwards("{name}.__code__ = _other.__code__", "{owner}.{name}.__code__ = _other.__code__"),
    "a function that is called": afterwards(
        "def _install():\n    global {name}\n    {name} = _other\n_install()",
        "def _install():\n    {owner}.{name} = _other\n_install()",
    ),
    "a default": afterwards(
        "def _unused(a=globals().update({name}=_other)):\n    pass",
        "def _unused(a=setattr({owner}, '{name}', _other)):\n    pass",
    ),
    "a decorator of another": afterwards(
        "def _install(function):\n    global {name}\n    {name} = _other\n@_install\ndef _more():\n    pass",
        "def _install(function):\n    {owner}.{name} = _other\n@_install\ndef _more():\n    pass",
    ),
    "a function of another module": afterwards(
        "from {elsewhere} import install\ninstall({name})", "from {elsewhere} import install\ninstall({owner})"
    ),
    "a class that sets it": afterwards(
        "class _Sets:\n    globals()['{name}'] = _other", "class _Sets:\n    {owner}.{name} = _other"
    ),
    "imported": afterwards("from {elsewhere} import other as {name}"),
    "imported with all": afterwards("from {elsewhere} import *"),
    "imported where it can be": afterwards("try:\n    from {elsewhere} import {name}\nexcept ImportError:\n    pass"),
    "another class of its name": afterwards(
        "class {name}({name}):\n    pass", "class {owner}({owner}):\n    {name} = _other"
    ),
    "a subclass": afterwards(
        "class _Sub({name}):\n    pass\n{name} = _Sub", "class _Sub({owner}):\n    {name} = _other\n{owner} = _Sub"
    ),
    "defined again": beside(AGAIN),
    "defined again under a condition": beside("if True:\n" + textwrap.indent(AGAIN, "    ")),
    "defined again in try": beside("try:\n" + textwrap.indent(AGAIN, "    ") + "\nfinally:\n    pass"),
    "defined again in else": beside("if None:\n    pass\nelse:\n" + textwrap.indent(AGAIN, "    ")),
    "another in the class": beside("{name} = _other"),
    "a lambda in the class": beside("{name} = lambda *args: None"),
    "set by the instance": in_class(
        "def __new__(cls, *a):\n    self = cls()\n    self.{name} = _other\n    return self"
    ),
    "set by the instance by name": in_class("def __new__(cls, *a):\n    setattr(cls, '{name}', _other)"),
    "decorated": decorated("(lambda function: _other)"),
    "decorated by a function": decorated("_replaced", "def _replaced(function):\n    return _other"),
    "decorated by an import": decorated("replaced", f"from {ELSEWHERE} import replaced"),
    "decorated by a partial": decorated("functools.partial(max, key=id)", "import functools"),
    "returned from first": with_body(lambda body: f"return _other()\n{body}"),
    "returned from under a condition": with_body(lambda body: f"if True:\n    return _other()\n{body}"),
    "returned from in with": with_body(lambda body: f"with open('f'):\n    return _other()\n{body}"),
    "returned from by both branches": with_body(
        lambda body: f"if __name__:\n    return _other()\nelse:\n    return None\n{body}"
    ),
    "raised first": with_body(lambda body: f"raise KeyError\n{body}"),
    "not run": with_body(lambda body: block("if False", body) + "\nreturn _other()"),
    "not run by a flag": with_body(lambda body: "old = False\n" + block("if old", body) + "\nreturn _other()"),
    "not run in a loop": with_body(lambda body: block("for _ in ()", body) + "\nreturn _other()"),
    "not called": with_body(lambda body: block("def old()", body) + "\nreturn _other()"),
}
"""By kind: after the edit, another function is what its name runs."""


def instead(text: str) -> Callable[[str, str], str]:
    """``text`` with the statements ``{new}``, which correct, and ``{old}``, which do not."""

    def kind(new: str, old: str) -> str:
        lines = []
        for line in text.split("\n"):
            rest = line.lstrip(" ")
            made = {"{new}": new, "{old}": old}.get(rest, rest)
            lines.append(textwrap.indent(made, line[: len(line) - len(rest)]))
        return "\n".join(lines)

    return kind


MIXTURES = {
    "in False": instead("if False:\n    {new}\nelse:\n    {old}"),
    "in not True": instead("if not True:\n    {new}\nelse:\n    {old}"),
    "in else": instead("if True:\n    {old}\nelse:\n    {new}"),
    "by a flag": instead("never = False\nif never:\n    {new}\nelse:\n    {old}"),
    "by a condition": instead("if __name__:\n    {old}\nelse:\n    {new}"),
    "in no loop": instead("for _ in ():\n    {new}\n{old}"),
    "in while False": instead("while False:\n    {new}\n{old}"),
    "not called": instead("def never():\n    {new}\n{old}"),
    "in a handler": instead("try:\n    {old}\nexcept KeyError:\n    {new}"),
    "twice": instead("{new}\n{old}"),
}
"""By kind: the corrected text is there, and the text with the defect is what runs, too or instead."""
