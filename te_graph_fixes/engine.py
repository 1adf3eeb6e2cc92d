"""From edits to running code: compose the edits of all fixes, compile what changed, put it in place, take it back.

A function is corrected by giving TransformerEngine's own function object the corrected code. Its identity, globals,
defaults, decorators, closure cells and every reference that somebody holds or has wrapped stay what they were, and a
wrapper that another tool has put around it, before or after us, is left alone.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import itertools
import linecache
import sys
from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import attrgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

from .fix import Verdict
from .source import Edit, ModuleSource, Source

_PATH = "<te_graph_fixes: {}>"
"""The name under which tracebacks and `inspect` show the corrected text of a module."""


class EngineError(Exception):
    """The edits of the fixes cannot be put together, or what they give cannot be put in place."""


def patched(source: Source, verdicts: Collection[Verdict]) -> dict[str, tuple[str, str]]:
    """The text (before, after) of every module that the applicable ``verdicts`` change or add ("" before)."""
    texts: dict[str, tuple[str, str]] = {}
    for verdict in verdicts:
        for name, text in verdict.new_modules.items():
            if texts.setdefault(name, ("", text)) != ("", text):
                raise EngineError(f"two fixes add module {name} with different text")
            if source.find(name) is not None:
                raise EngineError(f"module {name} is to be added, but {source.location} has it")
    for name, edits in _edits(verdicts).items():
        before, after, end = source.module(name).text, "", 0
        for edit in edits:
            if edit.start < end:
                raise EngineError(f"two fixes edit the same text of {name} at character {edit.start}")
            after += before[end : edit.start] + edit.text
            end = edit.end
        texts[name] = before, after + before[end:]
    return texts


def _edits(verdicts: Iterable[Verdict]) -> dict[str, list[Edit]]:
    """The edits by module, in order; of those that insert at one place, that of the first fix id comes first."""
    edits = [edit for verdict in sorted(verdicts, key=attrgetter("fix")) for edit in verdict.edits]
    edits.sort(key=attrgetter("module", "start", "end"))
    return {name: list(found) for name, found in itertools.groupby(edits, attrgetter("module"))}


@dataclass(frozen=True)
class Change:
    """One function of TransformerEngine, as its source has it and as it becomes; None where there is none.

    ``fixes`` change it or rest on it. ``block`` is the code of what a changed function is in: for a method, of a class
    body that holds it alone. ``defaults`` and ``kwdefaults`` are those of the parameters that it gets.
    """

    module: str
    qualname: str
    fixes: frozenset[str]
    before: CodeType | None
    after: CodeType | None
    block: CodeType | None = None
    defaults: tuple[object, ...] = ()
    kwdefaults: Mapping[str, object] = field(default_factory=dict)


def changes(source: Source, verdicts: Mapping[str, Verdict]) -> list[Change]:
    """Compile the functions that the ``verdicts``, by fix, change or rest on, as in their modules.

    Raises `EngineError` unless every edit lies inside a function or adds functions to a class, behind one of its own.
    """
    edits, texts = _edits(verdicts.values()), patched(source, verdicts.values())
    rests_on = {place for verdict in verdicts.values() for place in verdict.rests_on}
    found = []
    for module in map(source.module, sorted(edits.keys() | {name for name, _ in rests_on})):
        edited = _edited(module, edits[module.name], texts[module.name][1]) if module.name in edits else {}
        names = edited.keys() | {name for place, name in rests_on if place == module.name}
        known = {name: module.definitions.get(name) for name in sorted(names)}
        old_codes = _codes(module, {name: node for name, node in known.items() if isinstance(node, ast.FunctionDef)})
        new_codes = _codes(module, {name: node for name, (node, _) in edited.items()})
        for name in (name for name, node in known.items() if not isinstance(node, ast.ClassDef)):
            node, its = edited.get(name, (None, ()))
            _, before = old_codes.get(name, (None, None))
            block, after = new_codes.get(name, (None, before))
            if before and after and before.co_freevars != after.co_freevars:
                raise EngineError(f"the edits change the free variables of {name} in {module.path}")
            growth = _growth(module, known[name], node) if before and node else ()
            fixes = {fix for fix, v in verdicts.items() if (module.name, name) in v.rests_on or {*its} & {*v.edits}}
            found.append(Change(module.name, name, frozenset(fixes), before, after, block, *growth))
    return found


def _edited(module: ModuleSource, edits: list[Edit], text: str) -> dict[str, tuple[ast.FunctionDef, tuple[Edit, ...]]]:
    """The functions of the patched ``text`` that have edits, by qualified name, each with those; see `changes`."""
    edited: dict[str, tuple[ast.FunctionDef, tuple[Edit, ...]]] = {}
    for qualname, node in module.definitions.items():
        ends = module.starts[[*node.decorator_list, node][0].lineno], module.starts[cast(int, node.end_lineno) + 1]
        its = tuple(edit for edit in edits if ends[0] < edit.start and edit.end <= ends[1])
        if its and isinstance(node, ast.FunctionDef):
            start, end = (at + sum(len(e.text) - e.end + e.start for e in edits if e.end <= at) for at in ends)
            owner, dot, _ = qualname.rpartition(".")
            above = f"class {owner}:" if owner else ""
            tree = ast.parse(above + "\n" * text.count("\n", 0, start) + text[start:end], module.path)
            body = cast(ast.ClassDef, tree.body[0]).body if owner else tree.body
            found = {f"{owner}{dot}{each.name}": (each, its) for each in body if isinstance(each, ast.FunctionDef)}
            if qualname in found and len(found) == len(body) and len(tree.body) == 1:
                edited |= found
    if set(edits) != {edit for _, its in edited.values() for edit in its}:
        raise EngineError(f"an edit of {module.path} is not in a function, or leaves something other than functions")
    return edited


def _growth(module: ModuleSource, old: Any, new: Any) -> tuple[tuple[object, ...], dict[str, object]]:
    """Take the parameters off ``new`` that it has beyond ``old``: their defaults, by position and by keyword.

    Raises `EngineError` unless these are constants, and all else of the two heads is the same.
    """
    rest, known = new.args, [each.arg for each in old.args.kwonlyargs]
    by_position, by_keyword = rest.defaults[len(old.args.defaults) :], dict[str, Any]()
    del rest.args[len(rest.args) - len(by_position) :], rest.defaults[len(old.args.defaults) :]
    for place, parameter in reversed([*enumerate(rest.kwonlyargs)]):
        if parameter.arg not in known:
            by_keyword[rest.kwonlyargs.pop(place).arg] = rest.kw_defaults.pop(place)
    kept, had = ([*map(ast.dump, (each.args, *each.decorator_list))] for each in (new, old))
    are_constant = all(isinstance(value, ast.Constant) for value in (*by_position, *by_keyword.values()))
    if kept != had or not are_constant:
        raise EngineError(f"the edits do more to the head of {new.name} in {module.path} than add parameters")
    return tuple(each.value for each in by_position), {name: each.value for name, each in by_keyword.items()}


def _codes(module: ModuleSource, functions: Mapping[str, ast.FunctionDef]) -> dict[str, tuple[CodeType, CodeType]]:
    """The code of each function as in its module, behind that of what it is in: a class with it alone, or the module.

    What is no definition stays in the module: how a call compiles depends on what is imported.
    """
    definitions = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
    body: list[ast.stmt] = [each for each in module.tree.body if not isinstance(each, definitions)]
    for qualname, node in functions.items():
        owner = module.definitions.get(qualname.rpartition(".")[0])
        body.append(ast.ClassDef(**{**vars(owner), "body": [node]}) if owner else node)
    code = compile(ast.Module(body, []), _PATH.format(module.name), "exec", dont_inherit=True)
    blocks = [code, *(each for each in code.co_consts if isinstance(each, CodeType))]
    inner = [(block, each) for block in blocks for each in block.co_consts if isinstance(each, CodeType)]
    found = {f"{block.co_name}.{each.co_name}": (block, each) for block, each in inner}
    return {qualname: found[".".join(f"<module>.{qualname}".split(".")[-2:])] for qualname in functions}


def live_function(change: Change) -> Any:
    """What stands under the name of the function, seen through wrappers as far as TE's own; None if nothing does."""
    found, own = None, (change.before, change.after)
    with contextlib.suppress(KeyError, AttributeError, TypeError, ValueError):  # it is absent, or wrapped in a circle
        found = vars(_scope(change)).get(change.qualname.rpartition(".")[2])
        found = inspect.unwrap(found, stop=lambda each: type(each) is FunctionType and each.__code__ in own)
    return found


def _is_live(change: Change, code: CodeType | None) -> bool:
    """Whether the function has ``code`` (None: there is none); of a module that is not imported, if it may stay so."""
    if change.module not in sys.modules:
        return change.block is None
    found = live_function(change)
    return found is None if code is None else type(found) is FunctionType and found.__code__ == code


def _scope(change: Change) -> Any:
    """The module, or the class, that holds the function."""
    return reduce(getattr, change.qualname.split(".")[:-1], cast(Any, sys.modules[change.module]))


class Installation:
    """What has been put in place, and the means to take it back.

    ``verdicts`` are, by fix, those to apply, and those to leave TE as it is, which rest on functions too.
    """

    def __init__(self, source: Source, verdicts: Mapping[str, Verdict]) -> None:
        self._verdicts = verdicts
        self._changes = changes(source, verdicts)
        self._texts = patched(source, verdicts.values())
        self._set: list[tuple[Any, str, Any, Any]] = []  # attributes: what each was (None: it is new), and became

    def install(self, earlier: Iterable[FunctionType] = ()) -> None:
        """Put every change in place, or none: on any error what was done is taken back and the error is raised.

        ``earlier`` are functions of which a reload has made new ones: who holds them gets the correction as well.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self.revert)
            for name, (before, text) in self._texts.items():
                path = _PATH.format(name)
                linecache.cache[path] = (len(text), None, io.StringIO(text).readlines(), path)
                if not before:
                    module = ModuleType(name)
                    module.__package__, _, child = name.rpartition(".")
                    self._put(sys.modules[module.__package__], child, module)
                    sys.modules[name] = module
                    exec(compile(text, path, "exec", dont_inherit=True), vars(module))
            for change in self._changes:
                if change.block:
                    self._install(change, earlier)
            stack.pop_all()

    def _put(self, owner: Any, name: str, value: Any, had: Any = None) -> None:
        setattr(owner, name, value)
        self._set.append((owner, name, had, value))

    def _install(self, change: Change, earlier: Iterable[FunctionType]) -> None:
        if not _is_live(change, change.before):
            raise EngineError(f"{change.qualname} of {change.module} was replaced while it was being corrected")
        if change.before is None:
            scope, made = _scope(change), dict[str, Any]()
            exec(cast(CodeType, change.block), vars(sys.modules[change.module]), ChainMap(made, vars(scope)))
            if "__classcell__" in made:
                made["__classcell__"].cell_contents = scope
            name = change.qualname.rpartition(".")[2]
            self._put(scope, name, made[name])
            return
        own = [each for each in earlier if each.__module__ == change.module and each.__code__ == change.before]
        for function in {live_function(change), *own}:
            defaults = (*(function.__defaults__ or ()), *change.defaults)
            kwdefaults = {**change.kwdefaults, **(function.__kwdefaults__ or {})}
            gets = {"__code__": change.after, "__defaults__": defaults or None, "__kwdefaults__": kwdefaults or None}
            for name, value in gets.items():
                self._put(function, name, value, getattr(function, name))

    def replaced(self) -> dict[str, str]:
        """The fixes whose functions are not loaded as the source has them, each with what was found."""
        found = "somebody has replaced it, or that the file has changed since it was imported"
        return {
            fix: f"looked for {change.qualname} of {change.module} as its source has it, found that "
            + (found if change.module in sys.modules else "the module is not imported")
            for change in self._changes
            if not _is_live(change, change.before)
            for fix in change.fixes
        }

    def is_live(self, fix: str) -> bool:
        """Whether what was put in place for a fix, or found to be as it should be, is what runs."""
        modules = [sys.modules.get(name) for name in self._verdicts[fix].new_modules]
        added = [value for *_, value in self._set if isinstance(value, ModuleType)]
        return all(module in added for module in modules) and all(
            _is_live(change, change.after) for change in self._changes if fix in change.fixes
        )

    def revert(self) -> set[FunctionType]:
        """Take back what is still ours, each function the very objects that it had; returns the functions."""
        for owner, name, had, value in self._set:
            found = getattr(owner, name) if isinstance(owner, FunctionType) else vars(owner).get(name)
            if found is value and had is None:
                delattr(owner, name)
            elif found is value:
                setattr(owner, name, had)
            if isinstance(value, ModuleType) and sys.modules.get(value.__name__) is value:
                del sys.modules[value.__name__]
        return {owner for owner, *_ in self._set if isinstance(owner, FunctionType)}
