"""From edits to running code: compose the edits of all fixes, compile what changed, put it in place, take it back.

A function is corrected by giving TransformerEngine's own function object the corrected code. Its identity, globals,
defaults, decorators, closure cells and every reference that somebody holds or has wrapped stay what they were, and a
wrapper that another tool has put around it, before or after us, is left alone.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import dis
import importlib.util
import inspect
import io
import itertools
import linecache
import marshal
import os
import re
import struct
import sys
from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from operator import attrgetter
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any, NamedTuple, TypeAlias, cast

from .fix import Verdict
from .matching import words
from .outline import cut_down
from .shipped import compiled
from .source import Edit, ModuleSource, Source
from .tree import first_line

_PATH = "<te_graph_fixes: {}>"
"""The name under which tracebacks and `inspect` show the corrected text of a module."""
_NO_NAME = re.compile(r"\.\w+|\b\w+=(?!=)")
"""Attributes and keywords."""
_CHANGE = re.compile(r"\s*(?P<name>\w+) (?P<operator>[-+*/%@&|^<>]*)= (?P<value>.*)")
"""A line that sets a variable."""


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


class FunctionPatch(NamedTuple):
    """One function of TransformerEngine, as its source has it and as it becomes; None where there is none.

    ``fixes`` change it, or rest on it as it is: what is loaded has to be ``before``. Where it changes, ``block`` is the
    code of what it is in: of its module or, for a method, of a class body that holds it alone; None where it is only
    compared. ``defaults`` and ``kwdefaults`` are those of the parameters that it gets.
    """

    module: str
    qualname: str
    fixes: frozenset[str]
    before: CodeType | None
    after: CodeType | None
    block: CodeType | None = None
    defaults: tuple[object, ...] = ()
    kwdefaults: Mapping[str, object] = MappingProxyType({})


Lines: TypeAlias = "tuple[int, int]"
"""The first line of a function, and its last one."""


class _Edited(NamedTuple):
    """A function of the patched text, and the edits in it; ``node`` if they may change more than its body."""

    lines: Lines
    edits: list[Edit]
    node: ast.FunctionDef | None = None


def compile_patches(source: Source, verdicts: Mapping[str, Verdict]) -> list[FunctionPatch]:
    """Compile the functions that the ``verdicts``, by fix, change or rest on, as in their modules.

    Raises `EngineError` unless every edit lies inside a function or adds functions to a class, behind one of its own,
    and the names that the edits read are set.
    """
    edits, texts = _edits(verdicts.values()), patched(source, verdicts.values())
    rests_on = {place for verdict in verdicts.values() for place in verdict.rests_on}
    patches = []
    for module in map(source.module, sorted(edits.keys() | {name for name, _ in rests_on})):
        places = {name for place, name in rests_on if place == module.name}
        functions = _functions(module, places | module.found.keys())
        text = texts[module.name][1] if module.name in edits else module.text
        edited = _edited(module, functions, edits.get(module.name, []), text)
        names = edited.keys() | {name for name in places if name in functions or not module.find(name)}
        old_codes = _old_codes(module, {name: _lines(functions[name]) for name in names & functions.keys()})
        new_codes = _codes(module, text, {name: function.lines for name, function in edited.items()})
        for name in sorted(names):
            _, before = old_codes.get(name, (None, None))
            block, after = new_codes.get(name, (None, before))
            new = edited.get(name, _Edited((0, 0), []))
            if before and after and before.co_freevars != after.co_freevars:
                raise EngineError(f"the edits change the free variables of {name} in {module.path}")
            if before and after and (unset := _unset_names(module, before, after, new.edits)):
                raise EngineError(f"the edits read {min(unset)} in {name} of {module.path}, where nothing sets it")
            defaults = _new_defaults(module, functions[name], new.node) if before and new.node else ()
            fixes = {
                fix
                for fix, verdict in verdicts.items()
                if (module.name, name) in verdict.rests_on or not set(verdict.edits).isdisjoint(new.edits)
            }
            patches.append(FunctionPatch(module.name, name, frozenset(fixes), before, after, block, *defaults))
    return patches


def _functions(module: ModuleSource, places: Iterable[str]) -> dict[str, ast.FunctionDef]:
    """The functions at these places of a module, and those of the classes there."""
    found = {place: definition.node for place in places if (definition := module.find(place))}
    for name, owner in list(found.items()):
        if isinstance(owner, ast.ClassDef):
            methods = [node for node in owner.body if isinstance(node, ast.FunctionDef)]
            names = [node.name for node in methods]
            found |= {f"{name}.{node.name}": node for node in methods if names.count(node.name) == 1}
    return {name: node for name, node in found.items() if isinstance(node, ast.FunctionDef)}


def _lines(node: ast.FunctionDef) -> Lines:
    return first_line(node), cast(int, node.end_lineno)


def _edited(
    module: ModuleSource, functions: Mapping[str, ast.FunctionDef], edits: list[Edit], text: str
) -> dict[str, _Edited]:
    """By qualified name, those of the ``functions`` that have edits, and new ones, in the patched ``text``."""
    edited: dict[str, _Edited] = {}
    for qualname, node in functions.items():
        first, last = _lines(node)
        start, end = module.starts[first], module.starts[last + 1]
        its_edits = [edit for edit in edits if start < edit.start and edit.end <= end]
        if its_edits:
            (body, _), (_, body_end) = map(module.span, (node.body[0], node))
            start, end = (_moved(position, edits) for position in (start, end))
            if all(body <= edit.start and edit.end <= body_end for edit in its_edits):
                lines = text.count("\n", 0, start) + 1, text.count("\n", 0, end - 1) + 1
                edited[qualname] = _Edited(lines, its_edits)
            else:
                parsed = _parsed_functions(module, qualname, text[start:end], text.count("\n", 0, start))
                edited |= {name: _Edited(_lines(new), its_edits, new) for name, new in parsed.items()}
    if set(edits) != {edit for function in edited.values() for edit in function.edits}:
        raise EngineError(f"an edit of {module.path} is not in a function, or leaves something other than functions")
    return edited


def _moved(position: int, edits: list[Edit]) -> int:
    """Where a position of the original text is in the patched text."""
    return position + sum(len(edit.text) - (edit.end - edit.start) for edit in edits if edit.end <= position)


def _parsed_functions(module: ModuleSource, qualname: str, text: str, line: int) -> dict[str, ast.FunctionDef]:
    """The functions of a text that begins behind a ``line``; none unless it has ``qualname``, and functions alone."""
    owner, dot, _ = qualname.rpartition(".")
    above = f"class {owner}:" if owner else ""
    tree = ast.parse(above + "\n" * line + text, module.path)
    body = cast(ast.ClassDef, tree.body[0]).body if owner else tree.body
    functions = {f"{owner}{dot}{node.name}": node for node in body if isinstance(node, ast.FunctionDef)}
    is_whole = qualname in functions and len(functions) == len(body) and len(tree.body) == 1
    return functions if is_whole else {}


def _new_defaults(
    module: ModuleSource, old: ast.FunctionDef, new: ast.FunctionDef
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The defaults, by position and by keyword, of the parameters that ``new`` has beyond ``old``.

    Raises `EngineError` unless these are constants, and all else of the two heads is the same.
    """
    head = copy.deepcopy(new.args)
    first = len(old.args.defaults)
    by_position, head.defaults = head.defaults[first:], head.defaults[:first]
    head.args = head.args[: len(head.args) - len(by_position)]
    known = {parameter.arg for parameter in old.args.kwonlyargs}
    keywords = [*zip(head.kwonlyargs, head.kw_defaults, strict=True)]
    by_keyword = {parameter.arg: default for parameter, default in keywords if parameter.arg not in known}
    head.kwonlyargs = [parameter for parameter, _ in keywords if parameter.arg in known]
    head.kw_defaults = [default for parameter, default in keywords if parameter.arg in known]
    defaults = [*by_position, *by_keyword.values()]
    is_same = _dumped(head, *new.decorator_list) == _dumped(old.args, *old.decorator_list)
    if not is_same or not all(isinstance(default, ast.Constant) for default in defaults):
        raise EngineError(f"the edits do more to the head of {new.name} in {module.path} than add parameters")
    values = [cast(ast.Constant, default).value for default in defaults]
    return tuple(values[: len(by_position)]), dict(zip(by_keyword, values[len(by_position) :], strict=True))


def _dumped(*nodes: ast.AST) -> list[str]:
    return [ast.dump(node) for node in nodes]


def _unset_names(module: ModuleSource, before: CodeType, after: CodeType, edits: Sequence[Edit]) -> set[str]:
    """The names that only the code ``after`` these edits reads, and nobody has set by then."""
    known = {name for part in _parts(before) for name in part.co_names} | vars(builtins).keys()
    local, known_local = map(_local_names, (after, before))
    named = set().union(*(words(_NO_NAME.sub("", edit.text)) for edit in edits)) - known - local
    unset = set[str]()
    for part in _parts(after):
        suspects = named.intersection(part.co_names)
        if suspects and (suspects := suspects - module.global_names):
            steps = dis.get_instructions(part)
            unset |= {step.argval for step in steps if step.opname == "LOAD_GLOBAL"} & suspects
    lines = (line for edit in edits for line in edit.text.split("\n"))
    for found in filter(None, map(_CHANGE.match, lines)):
        if found["name"] not in known_local and (found["operator"] or found["name"] in words(found["value"])):
            unset.add(found["name"])
        known_local.add(found["name"])
    return unset


def _local_names(code: CodeType) -> set[str]:
    return {name for part in _parts(code) for name in (*part.co_varnames, *part.co_cellvars, *part.co_freevars)}


def _parts(code: CodeType) -> list[CodeType]:
    """A code object with those in it, and in these."""
    return [code, *(part for inner in _inner_codes(code) for part in _parts(inner))]


Codes: TypeAlias = "dict[str, tuple[CodeType, CodeType]]"
"""By qualified name, the code of the module or class body that defines a function, and that of the function."""


def _old_codes(module: ModuleSource, functions: Mapping[str, Lines]) -> Codes:
    """As `_codes`, of the text as it is: from Python's cache where that is known to be of this text."""
    with contextlib.suppress(OSError, NotImplementedError, StopIteration):
        stat = os.stat(module.path)
        data = Path(importlib.util.cache_from_source(module.path)).read_bytes()
        known = struct.pack("<4sIII", importlib.util.MAGIC_NUMBER, 0, int(stat.st_mtime) & 0xFFFFFFFF, stat.st_size)
        if module.is_file and data.startswith(known):
            return _codes_in(marshal.loads(data[len(known) :]), functions)
    return _codes(module, module.text, functions)


def _codes(module: ModuleSource, text: str, functions: Mapping[str, Lines]) -> Codes:
    """The code of the ``functions`` of a text, as in the module: how a call compiles depends on what is imported."""
    path = _PATH.format(module.name)
    with contextlib.suppress(SyntaxError, StopIteration):  # lines of a string begin in the first column
        return _codes_in(compile(cut_down(text, functions), path, "exec", dont_inherit=True), functions)
    return _codes_in(compile(text, path, "exec", dont_inherit=True), functions)


def _codes_in(module: CodeType, functions: Mapping[str, Lines]) -> Codes:
    """The code of the ``functions`` in that of a module; raises `StopIteration` where one is not there."""
    found = {}
    for qualname, (first, _) in functions.items():
        *owners, name = qualname.split(".")
        blocks = [block for block in _inner_codes(module) if block.co_name == owners[0]] if owners else [module]
        pairs = ((block, code) for block in blocks for code in _inner_codes(block))
        found[qualname] = next(
            (block, code) for block, code in pairs if (code.co_name, code.co_firstlineno) == (name, first)
        )
    return found


def _inner_codes(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def live_function(patch: FunctionPatch) -> Any:
    """What the name of the function stands for now; None if for nothing.

    Wrappers that have `__wrapped__` are followed down to TE's own function, or to the innermost if that is not there.
    """
    found, own = None, (patch.before, patch.after)
    with contextlib.suppress(KeyError, AttributeError, TypeError, ValueError):  # it is absent, or wrapped in a circle
        found = vars(_scope(patch)).get(patch.qualname.rpartition(".")[2])
        found = inspect.unwrap(found, stop=lambda each: type(each) is FunctionType and each.__code__ in own)
    return found


def _has_code(patch: FunctionPatch, code: CodeType | None) -> bool:
    """Whether what runs is ``code``, or nothing where that is None.

    A module that is not imported yet is right as it is, unless the function is to be changed.
    """
    if patch.module not in sys.modules:
        return patch.block is None
    found = live_function(patch)
    return found is None if code is None else type(found) is FunctionType and found.__code__ == code


def _scope(patch: FunctionPatch) -> Any:
    """The module, or the class, that holds the function."""
    return reduce(getattr, patch.qualname.split(".")[:-1], cast(Any, sys.modules[patch.module]))


class Installation:
    """What has been put in place, and the means to take it back.

    ``verdicts`` are, by fix, those to apply, and those to leave TE as it is, which rest on functions too.
    """

    def __init__(self, source: Source, verdicts: Mapping[str, Verdict]) -> None:
        self._verdicts = verdicts
        self._patches = compile_patches(source, verdicts)
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
                    exec(compiled(name, text) or compile(text, path, "exec", dont_inherit=True), vars(module))
            for patch in self._patches:
                if patch.block:
                    self._install(patch, earlier)
            stack.pop_all()

    def _put(self, owner: Any, name: str, value: Any, had: Any = None) -> None:
        setattr(owner, name, value)
        self._set.append((owner, name, had, value))

    def _install(self, patch: FunctionPatch, earlier: Iterable[FunctionType]) -> None:
        if not _has_code(patch, patch.before):
            raise EngineError(f"{patch.qualname} of {patch.module} was replaced while it was being corrected")
        if patch.before is None:
            scope, made = _scope(patch), dict[str, Any]()
            exec(cast(CodeType, patch.block), vars(sys.modules[patch.module]), ChainMap(made, vars(scope)))
            if "__classcell__" in made:
                made["__classcell__"].cell_contents = scope
            name = patch.qualname.rpartition(".")[2]
            self._put(scope, name, made[name])
            return
        own = [each for each in earlier if each.__module__ == patch.module and each.__code__ == patch.before]
        for function in {live_function(patch), *own}:
            defaults = (*(function.__defaults__ or ()), *patch.defaults)
            kwdefaults = {**patch.kwdefaults, **(function.__kwdefaults__ or {})}
            gets = {"__code__": patch.after, "__defaults__": defaults or None, "__kwdefaults__": kwdefaults or None}
            for name, value in gets.items():
                self._put(function, name, value, getattr(function, name))

    def not_as_in_file(self) -> dict[str, str]:
        """The fixes whose functions are not loaded as the source has them, each with what was found."""
        found = "another package has replaced it, or the file has changed since the import"
        return {
            fix: f"{patch.qualname} of {patch.module} is not what its file says: "
            + (found if patch.module in sys.modules else "the module is not imported")
            for patch in self._patches
            if not _has_code(patch, patch.before)
            for fix in patch.fixes
        }

    def is_live(self, fix: str) -> bool:
        """Whether what was put in place for a fix, or found to be as it should be, is what runs."""
        modules = [sys.modules.get(name) for name in self._verdicts[fix].new_modules]
        added = [value for *_, value in self._set if isinstance(value, ModuleType)]
        return all(module in added for module in modules) and all(
            _has_code(patch, patch.after) for patch in self._patches if fix in patch.fixes
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
