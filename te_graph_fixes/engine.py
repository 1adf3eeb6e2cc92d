"""From edits to running code: compose the edits of all fixes, compile what changed, put it in place, take it back.

A function is corrected by giving TransformerEngine's own function object the corrected code. Its identity, globals,
defaults, decorators, closure cells and every reference that somebody holds or has wrapped stay what they were, and a
wrapper that another tool has put around it, before or after us, is left alone.
"""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import linecache
import sys
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

from .fix import Verdict
from .source import DEFINITIONS, Edit, ModuleSource, Source, split_lines


class EngineError(Exception):
    """The edits of the fixes cannot be put together, or what they give cannot be put in place."""


def patched(source: Source, verdicts: Iterable[Verdict]) -> dict[str, tuple[str, str]]:
    """The text (before, after) of every module that the applicable ``verdicts`` change or add ("" before)."""
    verdicts = list(verdicts)
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


def _apply(text: str, edits: Iterable[Edit], start: int = 0) -> str:
    """``text``, which begins at character ``start`` of its module, with the edits made, which are in order."""
    pieces = []
    position = start
    for edit in edits:
        if edit.start < position:
            raise EngineError(f"two fixes edit the same text of {edit.module} at character {edit.start}")
        pieces += [text[position - start : edit.start - start], edit.text]
        position = edit.end
    return "".join([*pieces, text[position - start :]])


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
    """The functions of a module that the edits change or add, and those of ``names``, compiled together."""
    edited: dict[str, ast.FunctionDef] = {}
    its: dict[str, tuple[Edit, ...]] = {}
    for (qualname, start, end), group in itertools.groupby(edits, lambda edit: _function(module, edit)):
        found, owner = tuple(group), qualname.rpartition(".")[0]
        line = _apply(module.text[:start], [edit for edit in edits if edit.end <= start]).count("\n") + 1
        first, *added = _functions(module, owner, _apply(module.text[start:end], found, start), line)
        edited |= {qualname: first} | {f"{owner}.{node.name}": node for node in added}
        its |= dict.fromkeys(edited.keys() - its.keys(), found)
    known = {name: module.definitions.get(name) for name in sorted(names | edited.keys())}
    old = {name: node for name, node in known.items() if isinstance(node, ast.FunctionDef)}
    before, after = _compiled(module, old), _compiled(module, edited)
    for name in [name for name, node in known.items() if not isinstance(node, ast.ClassDef)]:
        code, new = _inside(before, name), _inside(after, name)
        if code and new:
            if code.co_freevars != new.co_freevars:
                raise EngineError(f"the edits change the free variables of {name} in {module.path}")
            yield Change(module.name, name, code, new, its[name], *_growth(module, old[name], edited[name]))
        elif new:
            block = _inside(_compiled(module, {name: edited[name]}), name.rpartition(".")[0])
            yield Change(module.name, name, None, _inside(block, edited[name].name), its[name], block=block)
        else:
            yield Change(module.name, name, code, code)


def _function(module: ModuleSource, edit: Edit) -> tuple[str, int, int]:
    """The function that an edit is in, or right behind: its qualified name, and where its lines start and end."""
    for qualname, node in module.definitions.items():
        start = module.line_start([*node.decorator_list, node][0].lineno)
        end = module.line_start(cast(int, node.end_lineno) + 1)
        if isinstance(node, ast.FunctionDef) and start < edit.start and edit.end <= end:
            return qualname, start, end
    raise EngineError(f"a fix changes text of {module.path} that is not in a function, nor adds one to a class")


def _functions(module: ModuleSource, owner: str, text: str, line: int) -> list[ast.FunctionDef]:
    """The functions in a piece of text that begins at ``line``; `EngineError` if there is anything else."""
    above = "\n" * (line - 2) + f"class {owner}:\n" if owner else "\n" * (line - 1)
    try:
        tree = ast.parse(above + text, module.path)
    except SyntaxError as error:
        raise EngineError(f"the edits do not leave Python text in {module.path}: {error}") from error
    body = cast(ast.ClassDef, tree.body[0]).body if owner else tree.body
    found = [node for node in body if isinstance(node, ast.FunctionDef)]
    if len(found) != len(body) or len(tree.body) != 1:
        raise EngineError(f"the edits leave something other than functions in {module.path}")
    return found


def _growth(module: ModuleSource, old: Any, new: Any) -> tuple[tuple[object, ...], dict[str, object]]:
    """The defaults of the parameters, by position and by keyword, that ``new`` has beyond ``old``.

    Raises `EngineError` unless these are constants, and all else of the two heads is the same.
    """
    rest = copy.copy(new.args)
    known = {parameter.arg for parameter in old.args.kwonlyargs}
    keywords = list(zip(rest.kwonlyargs, rest.kw_defaults, strict=True))
    by_position = rest.defaults[len(old.args.defaults) :]
    by_keyword = {each.arg: default for each, default in keywords if default and each.arg not in known}
    rest.args = rest.args[: len(rest.args) - len(by_position)]
    rest.defaults = rest.defaults[: len(old.args.defaults)]
    rest.kwonlyargs = [each for each in rest.kwonlyargs if each.arg not in by_keyword]
    rest.kw_defaults = [default for each, default in keywords if each.arg not in by_keyword]
    kept, had = ([*map(ast.dump, head)] for head in ((rest, *new.decorator_list), (old.args, *old.decorator_list)))
    are_constant = all(isinstance(value, ast.Constant) for value in (*by_position, *by_keyword.values()))
    if kept != had or new.name != old.name or not are_constant:
        raise EngineError(f"the edits do more to the head of {new.name} in {module.path} than add parameters")
    return tuple(each.value for each in by_position), {name: each.value for name, each in by_keyword.items()}


def _compiled(module: ModuleSource, functions: Mapping[str, ast.FunctionDef]) -> CodeType:
    """The code of a module with no definitions but the ``functions``, by qualified name, and the classes around them.

    What is no definition stays: how a call compiles depends on what the module imports.
    """
    tree = ast.Module([each for each in module.tree.body if not isinstance(each, DEFINITIONS)], [])
    bodies = {"": tree.body}
    for qualname, node in functions.items():
        owner = qualname.rpartition(".")[0]
        if owner not in bodies:
            holder = copy.copy(cast(ast.ClassDef, module.definitions[owner]))
            holder.body = bodies[owner] = []
            tree.body.append(holder)
        bodies[owner].append(node)
    return compile(tree, _path(module.name), "exec", dont_inherit=True)


def _inside(code: CodeType | None, qualname: str) -> CodeType | None:
    """The code of a function or class, by its qualified name, in that of the module; None where there is none."""
    for name in qualname.split(".")[-2:]:
        consts = code.co_consts if code else ()
        code = next((each for each in reversed(consts) if isinstance(each, CodeType) and each.co_name == name), None)
    return code


def _path(module: str) -> str:
    """The name under which tracebacks and `inspect` show the corrected text of a module."""
    return f"<te_graph_fixes: {module}>"


def live_function(change: Change) -> Any:
    """What stands under the name of the function, seen through wrappers as far as TE's own; None if nothing does."""

    def is_own(found: Any) -> bool:
        return type(found) is FunctionType and found.__code__ in (change.before, change.after)

    try:
        found = vars(_scope(change)).get(change.qualname.rpartition(".")[2])
    except (KeyError, AttributeError, TypeError):
        return None
    try:
        return inspect.unwrap(found, stop=is_own)
    except ValueError:  # wrappers in a circle
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
        self._corrected: list[tuple[FunctionType, dict[str, Any], dict[str, Any]]] = []  # each with what it had and got
        self._modules: dict[str, ModuleType] = {}

    def install(self, earlier: Iterable[FunctionType] = ()) -> None:
        """Put every change in place, or none: on any error what was done is taken back and the error is raised.

        ``earlier`` are functions of which a reload has made new ones: who holds them gets the correction as well.
        """
        try:
            for name, (before, text) in self._texts.items():
                path = _path(name)
                linecache.cache[path] = (len(text), None, split_lines(text), path)
                if not before:
                    self._add(name, text)
            for change in self._changes:
                if change.edits:
                    self._install(change, earlier)
        except BaseException:
            self.revert()
            raise

    def _add(self, name: str, text: str) -> None:
        module = self._modules[name] = sys.modules[name] = ModuleType(name)
        module.__package__, _, child = name.rpartition(".")
        exec(compile(text, _path(name), "exec", dont_inherit=True), vars(module))
        setattr(sys.modules[module.__package__], child, module)

    def _install(self, change: Change, earlier: Iterable[FunctionType]) -> None:
        if change.block:
            scope, made = _scope(change), dict[str, Any]()
            exec(change.block, vars(sys.modules[change.module]), ChainMap(made, vars(scope)))
            if "__classcell__" in made:
                made["__classcell__"].cell_contents = scope
            name = change.qualname.rpartition(".")[2]
            setattr(scope, name, made[name])
        elif not _is_live(change, change.before):
            raise EngineError(f"{change.qualname} of {change.module} was replaced while it was being corrected")
        else:
            own = [each for each in earlier if each.__module__ == change.module]
            for function in {live_function(change), *(each for each in own if each.__code__ == change.before)}:
                self._correct(function, change)

    def _correct(self, function: FunctionType, change: Change) -> None:
        gets: dict[str, Any] = {"__code__": change.after}
        if change.defaults:
            gets["__defaults__"] = (*(function.__defaults__ or ()), *change.defaults)
        if change.kwdefaults:
            gets["__kwdefaults__"] = {**change.kwdefaults, **(function.__kwdefaults__ or {})}
        self._corrected.append((function, {name: getattr(function, name) for name in gets}, gets))
        for name, value in gets.items():
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

    def is_live(self, fix_id: str | None = None) -> bool:
        """Whether what was put in place, or found to be as it should be, is what runs: for one fix, or for all."""
        fixes = self._verdicts if fix_id is None else [fix_id]
        modules = [name for fix in fixes for name in self._verdicts[fix].new_modules]
        return all(_is_live(change, change.after) for fix in fixes for change in self._of(fix)) and all(
            name in self._modules and sys.modules.get(name) is self._modules[name] for name in modules
        )

    def _of(self, fix: str) -> list[Change]:
        """The functions that a fix changes or rests on."""
        rests_on, edits = self._verdicts[fix].rests_on, set(self._verdicts[fix].edits)
        return [each for each in self._changes if (each.module, each.qualname) in rests_on or edits & set(each.edits)]

    def revert(self) -> list[FunctionType]:
        """Take back what is still ours, each function the very objects that it had; returns the functions."""
        for function, had, got in self._corrected:
            for name, value in got.items():
                if getattr(function, name) is value:
                    setattr(function, name, had[name])
        for change in self._changes:
            if change.block and _is_live(change, change.after):
                delattr(_scope(change), change.qualname.rpartition(".")[2])
        for name, module in self._modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
                parent, _, child = name.rpartition(".")
                if vars(sys.modules.get(parent, module)).get(child) is module:
                    delattr(sys.modules[parent], child)
        for name in self._texts:
            linecache.cache.pop(_path(name), None)
        self._modules.clear()
        return [function for function, _, _ in self._corrected]
