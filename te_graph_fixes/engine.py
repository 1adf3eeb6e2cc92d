"""From edits to running code: compose the edits of all fixes, compile what changed, put it in place, take it back.

A function is corrected by giving TransformerEngine's own function object the corrected code. Its identity, globals,
defaults, decorators, closure cells and every reference that somebody holds or has wrapped stay what they were, and a
wrapper that another tool has put around it, before or after us, is left alone.
"""

from __future__ import annotations

import ast
import io
import linecache
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias, cast

from .fix import Verdict
from .source import Edit, ModuleSource, Source

_Definitions: TypeAlias = Mapping[str, "ast.FunctionDef | ast.ClassDef"]
_PLAIN_DECORATORS: dict[str, Callable[[Any], Any]] = {"classmethod": classmethod, "staticmethod": staticmethod}


class EngineError(Exception):
    """The edits of the fixes cannot be put together, or what they give cannot be put in place."""


def patched(source: Source, verdicts: Iterable[Verdict]) -> dict[str, tuple[str, str]]:
    """The text (before, after) of every module that the applicable ``verdicts`` change or add ("" before)."""
    edits: dict[str, list[Edit]] = {}
    texts: dict[str, tuple[str, str]] = {}
    for verdict in sorted(verdicts, key=lambda verdict: verdict.fix):
        for edit in verdict.edits:
            edits.setdefault(edit.module, []).append(edit)
        for name, text in verdict.new_modules.items():
            if texts.setdefault(name, ("", text)) != ("", text):
                raise EngineError(f"two fixes add module {name} with different text")
            if source.find(name) is not None:
                raise EngineError(f"module {name} is to be added, but {source.location} has it")
    for name, module_edits in edits.items():
        text = source.module(name).text
        texts[name] = (text, _apply(text, module_edits))
    return texts


def _apply(text: str, edits: Sequence[Edit]) -> str:
    """The text with the edits made; those that insert at one place in the sequence in which they are given."""
    pieces = []
    position = 0
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        if edit.start < position:
            raise EngineError(f"two fixes edit the same text of {edit.module} at character {edit.start}")
        pieces += [text[position : edit.start], edit.text]
        position = edit.end
    return "".join([*pieces, text[position:]])


@dataclass
class Change:
    """One function of TransformerEngine, as it was and as it becomes; ``before`` is None for one that is added."""

    module: str
    qualname: str
    fixes: frozenset[str]
    before: CodeType | None
    after: CodeType
    lines: list[str]
    new_defaults: dict[str, Any] = field(default_factory=dict)
    decorator: str | None = None


def changes(source: Source, chosen: Mapping[str, Verdict]) -> list[Change]:
    """Compile what the verdicts of the ``chosen`` fixes change: only the functions concerned, as in their modules.

    Raises `EngineError` unless every edit lies inside a function or adds functions to a class.
    """
    edits: dict[str, list[tuple[str, Edit]]] = {}
    for fix, verdict in sorted(chosen.items()):
        for edit in verdict.edits:
            edits.setdefault(edit.module, []).append((fix, edit))
    return [change for name, found in edits.items() for change in _module_changes(source.module(name), found)]


def _module_changes(module: ModuleSource, edits: Sequence[tuple[str, Edit]]) -> list[Change]:
    line = len(module.lines) + 2
    found = []
    for fixes, owner, text in _pieces(module, edits):
        note = "# as corrected by te_graph_fixes\n"
        lines = [f"if True:  {note}" if owner else note, *io.StringIO(text)]  # legal above a method's indentation
        for node in _functions(module.path, owner, text, line):
            qualname = f"{owner}.{node.name}" if owner else node.name
            known = module.find(qualname)
            old = known.node if known and isinstance(known.node, ast.FunctionDef) else None
            before = _compile(module, owner, old) if old else None
            after = _compile(module, owner, node)
            if before and before.co_freevars != after.co_freevars:
                raise EngineError(f"the edits change the free variables of {qualname} in {module.path}")
            defaults = _new_defaults(old, node)
            decorator = None if before else _plain_decorator(node, module)
            found.append(Change(module.name, qualname, fixes, before, after, lines, defaults, decorator))
            line, lines = line + len(lines), []
    return found


def _pieces(module: ModuleSource, edits: Sequence[tuple[str, Edit]]) -> list[tuple[frozenset[str], str, str]]:
    """Each function that the edits change, and each addition to a class: the fixes, the class or "", and the text."""
    inside: dict[str, list[tuple[str, Edit]]] = {}
    pieces = []
    for fix, edit in edits:
        place = _place(module, module.definitions, edit)
        if place is None:
            raise EngineError(f"{fix} changes text of {module.path} that is not in a function, nor adds one to a class")
        name, node = place
        if isinstance(node, ast.FunctionDef):
            inside.setdefault(name, []).append((fix, edit))
        else:
            pieces.append((frozenset([fix]), name, edit.text))
    for name, its in inside.items():
        start, end = _span(module, module.definition(name).node)
        moved = [replace(edit, start=edit.start - start, end=edit.end - start) for _, edit in its]
        text = _apply(module.text[start:end], moved)
        pieces.append((frozenset(fix for fix, _ in its), name.rpartition(".")[0], text))
    return pieces


def _place(module: ModuleSource, nodes: _Definitions, edit: Edit) -> tuple[str, ast.stmt] | None:
    """The function that the edit is in, or else the class to which it adds."""
    owner = None
    for name, node in nodes.items():
        start, end = _span(module, node)
        if isinstance(node, ast.ClassDef):
            if start < edit.start == edit.end <= end:
                owner = name, node
        elif start < edit.start and (edit.end < end or edit.start < edit.end == end):
            return name, node
    return owner


def _span(module: ModuleSource, node: ast.FunctionDef | ast.ClassDef) -> tuple[int, int]:
    return module.line_start(_first_line(node)), module.line_start(cast(int, node.end_lineno) + 1)


def _first_line(node: ast.FunctionDef | ast.ClassDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _functions(path: str, owner: str, text: str, line: int) -> list[ast.FunctionDef]:
    """The functions in a piece of text that stands below ``line``; `EngineError` if there is anything else."""
    header = f"class {owner}:\n" if owner else "\n"
    try:
        tree = ast.parse("\n" * (line - 1) + header + text, path)
    except SyntaxError as error:
        raise EngineError(f"the edits do not leave Python text in {path}: {error}") from error
    body = cast(ast.ClassDef, tree.body[0]).body if owner else tree.body
    found = [node for node in body if isinstance(node, ast.FunctionDef)]
    if len(found) != len(body) or len(tree.body) != 1:
        raise EngineError(f"the edits leave something other than functions in {path}")
    return found


def _compile(module: ModuleSource, owner: str, node: ast.FunctionDef) -> CodeType:
    """The code of one function, compiled as in its class and with the module's imports, on which calls depend."""
    body: list[ast.stmt] = [node]
    if owner:
        outer = cast(ast.ClassDef, ast.parse(f"class {owner}: pass").body[0])
        outer.body, body = body, [outer]
    code = compile(ast.Module([*module.imports, *body], []), module.path, "exec", dont_inherit=True)
    return cast(CodeType, _inner(code, owner, node.name))


def _inner(code: CodeType, owner: str, name: str) -> CodeType | None:
    """The code of a function of a module or, if there is an ``owner``, of that class; None unless there is just one."""
    for wanted in filter(None, (owner, name)):
        found = [const for const in code.co_consts if isinstance(const, CodeType) and const.co_name == wanted]
        if len(found) != 1:
            return None
        code = found[0]
    return code


def _new_defaults(old: ast.FunctionDef | None, new: ast.FunctionDef) -> dict[str, Any]:
    """Literal defaults of the parameters that ``new`` has beyond ``old``; all else about the call must be the same."""
    positional, keyword = _parameters(new)
    known_positional, known_keyword = _parameters(old) if old else ({}, {})
    if old and (
        list(positional.items())[: len(known_positional)] != list(known_positional.items())
        or not known_keyword.items() <= keyword.items()
        or list(map(ast.dump, old.decorator_list)) != list(map(ast.dump, new.decorator_list))
    ):
        raise EngineError(f"the edits change the decorators, or parameters that {new.name} already had")
    defaults = {
        name: default
        for name, default in {**positional, **keyword}.items()
        if name not in known_positional and name not in known_keyword and (old or default)
    }
    try:
        return {name: ast.literal_eval(default) for name, default in defaults.items()}
    except (ValueError, SyntaxError) as error:
        raise EngineError(f"a new parameter of {new.name} has no literal default: {error}") from error


def _parameters(node: ast.FunctionDef) -> tuple[dict[str, str], dict[str, str]]:
    """The positional and the keyword-only parameters with the text of their defaults ("" where there is none)."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [""] * (len(positional) - len(arguments.defaults)) + [ast.unparse(node) for node in arguments.defaults]
    keyword = [ast.unparse(node) if node else "" for node in arguments.kw_defaults]
    return (
        {argument.arg: default for argument, default in zip(positional, defaults, strict=True)},
        {argument.arg: default for argument, default in zip(arguments.kwonlyargs, keyword, strict=True)},
    )


def _plain_decorator(node: ast.FunctionDef, module: ModuleSource) -> str | None:
    names = [ast.unparse(decorator) for decorator in node.decorator_list]
    if not names:
        return None
    if len(names) > 1 or names[0] not in _PLAIN_DECORATORS:
        raise EngineError(f"cannot add {node.name} to {module.path} with decorators {names}")
    return names[0]


def live_function(change: Change) -> FunctionType | None:
    """The function object that ``change`` is about, found through any wrappers; None if TE's own is not there."""
    found: Any = sys.modules.get(change.module)
    for part in change.qualname.split("."):
        if found is None or part not in vars(found):
            return None
        found = vars(found)[part]
    for _ in range(100):
        if isinstance(found, (classmethod, staticmethod)):
            found = found.__func__
        elif type(found) is FunctionType and found.__code__ in (change.before, change.after):
            return found
        elif hasattr(found, "__wrapped__"):
            found = found.__wrapped__
        else:
            break
    return None


class Installation:
    """What has been put in place, and the means to take it back.

    ``earlier`` are functions, each with its module and qualified name, of which a reload has made new ones: somebody
    may hold them, so they are corrected as well.
    """

    def __init__(
        self,
        source: Source,
        chosen: Mapping[str, Verdict],
        earlier: Mapping[FunctionType, tuple[str, str]] | None = None,
    ) -> None:
        self._source = source
        self._chosen = chosen
        self._changes = changes(source, chosen)
        self._earlier = earlier or {}
        self._installed: list[tuple[Change, FunctionType]] = []
        self._kept: list[tuple[Change, FunctionType]] = []
        self._modules: dict[str, ModuleType] = {}
        self._linecache: dict[str, tuple[Any, Any]] = {}

    def install(self) -> None:
        """Put every change in place, or none: on any error what was done is taken back and the error is raised."""
        try:
            for verdict in self._chosen.values():
                for name, text in verdict.new_modules.items():
                    if name not in self._modules:
                        self._modules[name] = _add_module(name, text)
            for change in self._changes:
                self._installed.append((change, _install(change)))
                for function, place in self._earlier.items():
                    if place == (change.module, change.qualname) and function.__code__ == change.before:
                        _set_code(function, change.after, change.new_defaults)
                        self._kept.append((change, function))
            self._show_lines()
        except BaseException:
            self.revert()
            raise

    def replaced(self) -> dict[str, str]:
        """The fixes whose functions are not loaded as the source has them, each with what was found."""
        found = {}
        for change in self._changes:
            owner, _, name = change.qualname.rpartition(".")
            if change.before is None:
                wrong = name in vars(vars(sys.modules[change.module])[owner])
            else:
                wrong = live_function(change) is None
            if wrong:
                text = (
                    f"looked for {change.qualname} of {change.module} as its source has it, found that somebody has "
                    "replaced it, or that the file has changed since it was imported"
                )
                found.update(dict.fromkeys(change.fixes, text))
        return found

    def is_live(self, fix_id: str | None = None) -> bool:
        """Whether what was put in place (for one fix, or for all) is still what runs."""
        chosen = self._chosen.values() if fix_id is None else [self._chosen[fix_id]]
        modules = [name for verdict in chosen for name in verdict.new_modules]
        return all(
            live_function(change) is function and function.__code__ is change.after
            for change, function in self._installed
            if fix_id is None or fix_id in change.fixes
        ) and all(sys.modules.get(name) is self._modules[name] for name in modules)

    def revert(self) -> dict[FunctionType, tuple[str, str]]:
        """Take back, in reverse order, what is still ours; returns the functions that have their own code again."""
        restored = {}
        for change, function in reversed(self._installed + self._kept):
            if function.__code__ is change.after:
                _uninstall(change, function)
                if change.before is not None:
                    restored[function] = (change.module, change.qualname)
        self._installed.clear()
        self._kept.clear()
        for name, module in reversed(list(self._modules.items())):
            if sys.modules.get(name) is module:
                del sys.modules[name]
                parent, _, child = name.rpartition(".")
                if vars(sys.modules.get(parent, module)).get(child) is module:
                    delattr(sys.modules[parent], child)
        self._modules.clear()
        for path, (before, after) in self._linecache.items():
            if linecache.cache.get(path) is after:
                linecache.cache.pop(path)
                if before is not None:
                    linecache.cache[path] = before
        self._linecache.clear()
        return restored

    def _show_lines(self) -> None:
        """Let tracebacks and `inspect.getsource` show the corrected functions, below the lines of their file."""
        for name in {change.module for change in self._changes}:
            module = self._source.module(name)
            lines = [*module.lines, "\n"]
            for change in self._changes:
                if change.module == name:
                    lines += change.lines
            entry = (sum(map(len, lines)), None, lines, module.path)
            self._linecache[module.path] = (linecache.cache.get(module.path), entry)
            linecache.cache[module.path] = entry


def _add_module(name: str, text: str) -> ModuleType:
    module = ModuleType(name)
    module.__package__ = name.rpartition(".")[0]
    path = f"<te_graph_fixes: {name}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    sys.modules[name] = module
    try:
        exec(compile(text, path, "exec", dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    setattr(sys.modules[module.__package__], name.rpartition(".")[2], module)
    return module


def _install(change: Change) -> FunctionType:
    if change.before is None:
        return _add_function(change)
    function = live_function(change)
    if function is None:
        raise EngineError(f"{change.qualname} of {change.module} was replaced while it was being corrected")
    _set_code(function, change.after, change.new_defaults)
    return function


def _set_code(function: FunctionType, code: CodeType, extra: Mapping[str, Any]) -> None:
    names = code.co_varnames[: code.co_argcount]
    positional = tuple(extra[name] for name in names if name in extra)
    keywords = {name: value for name, value in extra.items() if name not in names}
    function.__code__ = code
    if positional:
        function.__defaults__ = (*(function.__defaults__ or ()), *positional)
    if keywords:
        function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), **keywords}


def _uninstall(change: Change, function: FunctionType) -> None:
    if change.before is None:
        owner, _, name = change.qualname.rpartition(".")
        found = vars(sys.modules[change.module]).get(owner)
        if live_function(change) is function:
            delattr(found, name)
        return
    names = change.after.co_varnames[: change.after.co_argcount]
    positional = sum(name in names for name in change.new_defaults)
    function.__code__ = change.before
    if positional:
        function.__defaults__ = cast("tuple[Any, ...]", function.__defaults__)[:-positional] or None
    if len(change.new_defaults) > positional:
        kept = {k: v for k, v in (function.__kwdefaults__ or {}).items() if k not in change.new_defaults}
        function.__kwdefaults__ = kept or None


def _add_function(change: Change) -> FunctionType:
    module = sys.modules[change.module]
    owner, _, name = change.qualname.rpartition(".")
    function = FunctionType(change.after, vars(module), name)
    function.__qualname__ = change.qualname
    function.__module__ = change.module
    _set_code(function, change.after, change.new_defaults)
    decorate = _PLAIN_DECORATORS.get(change.decorator or "")
    setattr(vars(module)[owner], name, decorate(function) if decorate else function)
    return function
