"""From edits to running code: compose the edits of all fixes, compile what changed, put it in place, take it back.

A function is corrected by giving TransformerEngine's own function object the corrected code. Its identity, globals,
defaults, decorators, closure cells and every reference that somebody holds or has wrapped stay what they were, and a
wrapper that another tool has put around it, before or after us, is left alone.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import io
import itertools
import linecache
import sys
from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

from .fix import Verdict
from .source import DEFINITIONS, Edit, ModuleSource, Source


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
        text = source.module(name).text
        texts[name] = (text, _apply(text, edits))
    return texts


def _edits(verdicts: Iterable[Verdict]) -> dict[str, list[Edit]]:
    """The edits by module; of those that insert at one place, that of the first fix id comes first."""
    edits: dict[str, list[Edit]] = {}
    for verdict in sorted(verdicts, key=lambda verdict: verdict.fix):
        for edit in verdict.edits:
            edits.setdefault(edit.module, []).append(edit)
    return {name: sorted(found, key=lambda edit: (edit.start, edit.end)) for name, found in edits.items()}


def _apply(text: str, edits: Sequence[Edit], start: int = 0) -> str:
    """``text``, which begins at character ``start`` of its module, with the edits made, which are in order."""
    following = start + len(text)
    for edit in reversed(edits):
        if edit.end > following:
            raise EngineError(f"two fixes edit the same text of {edit.module} at character {following}")
        text = text[: edit.start - start] + edit.text + text[edit.end - start :]
        following = edit.start
    return text


@dataclass(frozen=True)
class Change:
    """One function of TransformerEngine, as its source has it and as it becomes; None where there is none.

    ``defaults`` and ``kwdefaults`` are those of the parameters that it gets. ``block`` is the code of a class body
    that holds just this function, which is added to the class.
    """

    module: str
    qualname: str
    before: CodeType | None
    after: CodeType | None
    edits: tuple[Edit, ...] = ()
    defaults: tuple[object, ...] = ()
    kwdefaults: Mapping[str, object] = field(default_factory=dict)
    block: CodeType | None = None


def changes(source: Source, verdicts: Mapping[str, Verdict]) -> list[Change]:
    """Compile the functions that the ``verdicts``, by fix, change or rest on, as in their modules.

    Raises `EngineError` unless every edit lies inside a function or adds functions to a class, behind one of its own.
    """
    edits = _edits(verdicts.values())
    names: dict[str, set[str]] = {name: set() for name in edits}
    for name, qualname in itertools.chain.from_iterable(verdict.rests_on for verdict in verdicts.values()):
        names.setdefault(name, set()).add(qualname)
    modules = ((source.module(name), edits.get(name, []), names[name]) for name in sorted(names))
    return [change for module in modules for change in _module_changes(*module)]


def _module_changes(module: ModuleSource, edits: list[Edit], names: set[str]) -> Iterator[Change]:
    """The functions of a module that the edits change or add, and those of ``names``."""
    edited = _edited(module, edits)
    known = {name: module.definitions.get(name) for name in sorted(names | edited.keys())}
    old_codes = _codes(module, {name: node for name, node in known.items() if isinstance(node, ast.FunctionDef)})
    new_codes = _codes(module, {name: node for name, (node, _) in edited.items()})
    for name in [name for name, node in known.items() if not isinstance(node, ast.ClassDef)]:
        (_, before), (block, after) = (codes.get(name, (None, None)) for codes in (old_codes, new_codes))
        new, its = edited.get(name, (None, ()))
        if after is None:
            yield Change(module.name, name, before, before)
        elif before is None:
            yield Change(module.name, name, None, after, its, block=block)
        elif before.co_freevars != after.co_freevars:
            raise EngineError(f"the edits change the free variables of {name} in {module.path}")
        else:
            yield Change(module.name, name, before, after, its, *_growth(module, known[name], new))


def _edited(module: ModuleSource, edits: list[Edit]) -> dict[str, tuple[ast.FunctionDef, tuple[Edit, ...]]]:
    """The functions that the edits leave where there are edits, by qualified name, each with those; see `changes`."""
    edited: dict[str, tuple[ast.FunctionDef, tuple[Edit, ...]]] = {}
    for qualname, node in module.definitions.items():
        start = module.starts[[*node.decorator_list, node][0].lineno]
        end = module.starts[cast(int, node.end_lineno) + 1]
        its = tuple(edit for edit in edits if start < edit.start and edit.end <= end)
        if its and isinstance(node, ast.FunctionDef):
            owner, dot, _ = qualname.rpartition(".")
            lines = _apply(module.text[:start], [edit for edit in edits if edit.end <= start]).count("\n")
            above = "\n" * (lines - 1) + f"class {owner}:\n" if owner else "\n" * lines
            tree = ast.parse(above + _apply(module.text[start:end], its, start), module.path)
            body = cast(ast.ClassDef, tree.body[0]).body if owner else tree.body
            found = {f"{owner}{dot}{each.name}": (each, its) for each in body if isinstance(each, ast.FunctionDef)}
            if qualname not in found or len(found) != len(body) or len(tree.body) != 1:
                raise EngineError(f"the edits leave something other than functions in {module.path}")
            edited |= found
    if set(edits) != {edit for _, its in edited.values() for edit in its}:
        raise EngineError(f"a fix changes text of {module.path} that is not in a function, nor adds one to a class")
    return edited


def _growth(module: ModuleSource, old: Any, new: Any) -> tuple[tuple[object, ...], dict[str, object]]:
    """The defaults of the parameters, by position and by keyword, that ``new`` has beyond ``old``.

    Raises `EngineError` unless these are constants, and all else of the two heads is the same.
    """
    rest, known = copy.deepcopy(new.args), [each.arg for each in old.args.kwonlyargs]
    by_position, by_keyword = rest.defaults[len(old.args.defaults) :], dict[str, Any]()
    del rest.args[len(rest.args) - len(by_position) :], rest.defaults[len(old.args.defaults) :]
    for place, parameter in reversed([*enumerate(rest.kwonlyargs)]):
        if parameter.arg not in known:
            by_keyword[rest.kwonlyargs.pop(place).arg] = rest.kw_defaults.pop(place)
    kept, had = ([*map(ast.dump, head)] for head in ((rest, *new.decorator_list), (old.args, *old.decorator_list)))
    are_constant = all(isinstance(value, ast.Constant) for value in (*by_position, *by_keyword.values()))
    if kept != had or not are_constant:
        raise EngineError(f"the edits do more to the head of {new.name} in {module.path} than add parameters")
    return tuple(each.value for each in by_position), {name: each.value for name, each in by_keyword.items()}


def _codes(module: ModuleSource, functions: Mapping[str, ast.FunctionDef]) -> dict[str, tuple[CodeType, CodeType]]:
    """The code of each function as in its module, behind that of what it is in: a class with it alone, or the module.

    What is no definition stays in the module: how a call compiles depends on what is imported.
    """
    body: list[ast.stmt] = [each for each in module.tree.body if not isinstance(each, DEFINITIONS)]
    for qualname, node in functions.items():
        if owner := qualname.rpartition(".")[0]:
            holder = copy.copy(cast(ast.ClassDef, module.definitions[owner]))
            holder.body = [node]
        body.append(holder if owner else node)
    code = compile(ast.Module(body, []), _path(module.name), "exec", dont_inherit=True)
    found = {}
    for block in (code, *code.co_consts):
        for each in block.co_consts if isinstance(block, CodeType) else ():
            if isinstance(each, CodeType):
                found[block.co_name, each.co_name] = block, each
    places = {qualname: f"{code.co_name}.{qualname}".split(".")[-2:] for qualname in functions}
    return {qualname: found[owner, name] for qualname, (owner, name) in places.items()}


def _path(module: str) -> str:
    """The name under which tracebacks and `inspect` show the corrected text of a module."""
    return f"<te_graph_fixes: {module}>"


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
        return not change.edits
    found = live_function(change)
    return found is None if code is None else type(found) is FunctionType and found.__code__ == code


def _scope(change: Change) -> Any:
    """The module, or the class, that holds the function."""
    owner = change.qualname.rpartition(".")[0]
    module = sys.modules[change.module]
    return attrgetter(owner)(module) if owner else module


class Installation:
    """What has been put in place, and the means to take it back.

    ``verdicts`` are, by fix, those to apply, and those to leave TE as it is, which rest on functions too.
    """

    def __init__(self, source: Source, verdicts: Mapping[str, Verdict]) -> None:
        self._verdicts = verdicts
        self._changes = changes(source, verdicts)
        self._texts = patched(source, verdicts.values())
        self._set: list[tuple[FunctionType, str, Any, Any]] = []  # attributes: what each was, and what it became
        self._added: list[tuple[Any, str, Any]] = []

    def install(self, earlier: Iterable[FunctionType] = ()) -> None:
        """Put every change in place, or none: on any error what was done is taken back and the error is raised.

        ``earlier`` are functions of which a reload has made new ones: who holds them gets the correction as well.
        """
        try:
            for name, (before, text) in self._texts.items():
                path = _path(name)
                linecache.cache[path] = (len(text), None, io.StringIO(text).readlines(), path)
                if not before:
                    self._add_module(name, text)
            for change in self._changes:
                if change.edits:
                    self._install(change, earlier)
        except BaseException:
            self.revert()
            raise

    def _add(self, owner: Any, name: str, value: Any) -> None:
        setattr(owner, name, value)
        self._added.append((owner, name, value))

    def _add_module(self, name: str, text: str) -> None:
        module = ModuleType(name)
        module.__package__, _, child = name.rpartition(".")
        self._add(sys.modules[module.__package__], child, module)
        sys.modules[name] = module
        exec(compile(text, _path(name), "exec", dont_inherit=True), vars(module))

    def _install(self, change: Change, earlier: Iterable[FunctionType]) -> None:
        if change.block:
            scope, made = _scope(change), dict[str, Any]()
            exec(change.block, vars(sys.modules[change.module]), ChainMap(made, vars(scope)))
            if "__classcell__" in made:
                made["__classcell__"].cell_contents = scope
            name = change.qualname.rpartition(".")[2]
            self._add(scope, name, made[name])
        elif not _is_live(change, change.before):
            raise EngineError(f"{change.qualname} of {change.module} was replaced while it was being corrected")
        else:
            own = [each for each in earlier if each.__module__ == change.module]
            for function in {live_function(change), *(each for each in own if each.__code__ == change.before)}:
                gets: dict[str, Any] = {"__code__": change.after}
                if change.defaults:
                    gets["__defaults__"] = (*(function.__defaults__ or ()), *change.defaults)
                if change.kwdefaults:
                    gets["__kwdefaults__"] = {**change.kwdefaults, **(function.__kwdefaults__ or {})}
                for name, value in gets.items():
                    self._set.append((function, name, getattr(function, name), value))
                    setattr(function, name, value)

    def replaced(self) -> dict[str, str]:
        """The fixes whose functions are not loaded as the source has them, each with what was found."""
        found = "somebody has replaced it, or that the file has changed since it was imported"
        return {
            fix: f"looked for {change.qualname} of {change.module} as its source has it, found that "
            + (found if change.module in sys.modules else "the module is not imported")
            for fix in self._verdicts
            for change in self._of(fix)
            if not _is_live(change, change.before)
        }

    def is_live(self, *fixes: str) -> bool:
        """Whether what was put in place, or found to be as it should be, is what runs: for these fixes, or for all."""
        fixes = fixes or tuple(self._verdicts)
        modules = [sys.modules.get(name) for fix in fixes for name in self._verdicts[fix].new_modules]
        return all(module in [value for _, _, value in self._added] for module in modules) and all(
            _is_live(change, change.after) for fix in fixes for change in self._of(fix)
        )

    def _of(self, fix: str) -> list[Change]:
        """The functions that a fix changes or rests on."""
        rests_on, edits = self._verdicts[fix].rests_on, set(self._verdicts[fix].edits)
        return [each for each in self._changes if (each.module, each.qualname) in rests_on or edits & set(each.edits)]

    def revert(self) -> set[FunctionType]:
        """Take back what is still ours, each function the very objects that it had; returns the functions."""
        for function, name, had, value in self._set:
            if getattr(function, name) is value:
                setattr(function, name, had)
        for owner, name, value in self._added:
            if vars(owner).get(name) is value:
                delattr(owner, name)
            if isinstance(value, ModuleType) and sys.modules.get(value.__name__) is value:
                del sys.modules[value.__name__]
        return {function for function, *_ in self._set}
