"""From edits to running code: compose the edits of all fixes, compile what changed, put it in place, take it back.

A function is corrected by giving TransformerEngine's own function object the corrected code. Its identity, globals,
defaults, decorators, closure cells and every reference that somebody holds or has wrapped stay what they were, and a
wrapper that another tool has put around it, before or after us, is left alone.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
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
import textwrap
from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import reduce
from operator import attrgetter
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeAlias, cast

from .fix import Verdict
from .matching import words
from .outline import cut_down
from .shipped import compiled
from .source import Edit, ModuleSource, Source
from .tree import first_line

_PATH = "<te_graph_fixes: {}>"
"""The name under which tracebacks and `inspect` show the corrected text of a module."""
_NO_NAME = re.compile(r"#.*|\"[^\"]*\"|\.\w+|\b\w+=(?!=)")
"""Comments, strings, attributes and keywords."""
_CHANGE = re.compile(r"\s*(?P<name>\w+) (?P<operator>[-+*/%@&|^<>]*)= (?P<value>.*)")
"""A line that sets a variable."""


class EngineError(Exception):
    """The edits of the fixes cannot be put together, or what they give cannot be put in place."""


def patched(source: Source, verdicts: Collection[Verdict]) -> dict[str, tuple[str, str]]:
    """The text (before, after) of every module that the applicable ``verdicts`` change or add ("" before)."""
    texts = {name: ("", text) for verdict in verdicts for name, text in verdict.new_modules.items()}
    for name in texts:
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

    Where the ``edits`` change it, ``block`` is the code of what it is in: of its module or, for a method, of a class
    body. ``defaults`` are those of the parameters that the edits add.
    """

    module: str
    qualname: str
    before: CodeType | None
    after: CodeType | None
    block: CodeType | None = None
    edits: Collection[Edit] = ()
    defaults: tuple[object, ...] = ()

    def concerns(self, verdict: Verdict) -> bool:
        """Whether the verdict changes the function, or rests on it as it is."""
        return (self.module, self.qualname) in verdict.rests_on or not set(self.edits).isdisjoint(verdict.edits)

    @property
    def scope(self) -> Any:
        """The module, or the class, that holds the function."""
        return reduce(getattr, self.qualname.split(".")[:-1], cast(Any, sys.modules[self.module]))

    @property
    def live(self) -> Any:
        """What the name of the function stands for now; None if for nothing.

        Wrappers that have `__wrapped__` are followed down to TE's own function, or to the innermost if that is not
        there.
        """
        found, own = None, (self.after, self.before)
        with contextlib.suppress(KeyError, AttributeError, TypeError, ValueError):  # absent, or wrapped in a circle
            found = vars(self.scope).get(self.qualname.rpartition(".")[2])
            found = inspect.unwrap(found, stop=lambda each: type(each) is FunctionType and each.__code__ in own)
        return found

    def runs(self, code: CodeType | None) -> bool:
        """Whether what runs is ``code``, or nothing where that is None.

        A module that is not imported yet is right as it is, unless the function is to be changed.
        """
        if self.module not in sys.modules:
            return self.block is None
        found = self.live
        return found is None if code is None else type(found) is FunctionType and found.__code__ == code


Lines: TypeAlias = "tuple[int, int]"
"""The first line of a function, and its last one."""


def compile_patches(source: Source, verdicts: Mapping[str, Verdict]) -> list[FunctionPatch]:
    """Compile the functions that the ``verdicts``, by fix, change or rest on, as in their modules.

    Raises `EngineError` unless every edit lies inside a function or adds functions to a class, behind one of its own,
    and the names that the edits read are set.
    """
    edits, texts = _edits(verdicts.values()), patched(source, verdicts.values())
    rests_on = {place for verdict in verdicts.values() for place in verdict.rests_on}
    patches: list[FunctionPatch] = []
    for module in map(source.module, sorted(edits.keys() | {name for name, _ in rests_on})):
        places = {qualname for name, qualname in rests_on if name == module.name}
        _, text = texts.get(module.name, ("", module.text))
        patches += _patches(module, text, edits.get(module.name, []), places)
    return patches


def _patches(module: ModuleSource, text: str, edits: list[Edit], places: set[str]) -> Iterator[FunctionPatch]:
    """The functions at these places of a module, and those that the edits, which lead to ``text``, change or add."""
    functions = _functions(module, places | module.found.keys())
    edited = {name: inside for name, node in functions.items() if (inside := _inside(module, node, edits))}
    if len(edits) != sum(map(len, edited.values())):
        raise EngineError(f"an edit of {module.path} is not in a function")
    for name, inside in edited.items():
        _require_methods_below(module, functions[name], inside)
    names = edited.keys() | {name for name in places if name in functions or not module.find(name)}
    new_lines = {name: _new_lines(module, functions[name], edits) for name in edited}
    old_codes = _old_codes(module, {name: _lines(functions[name]) for name in names & functions.keys()})
    new_codes = _codes(module, text, new_lines) if edits else {}
    for name in names | new_codes.keys():
        _, before = old_codes.get(name, (None, None))
        block, after = new_codes.get(name, (None, before))
        its_edits = edited.get(name, edits) if block else []
        defaults: tuple[object, ...] = ()
        if block and before and after:
            _require_fit(module, name, before, after, its_edits)
            defaults = _new_defaults(module, functions[name], its_edits, text, new_lines[name])
        yield FunctionPatch(module.name, name, before, after, block, its_edits, defaults)


def _functions(module: ModuleSource, places: Iterable[str]) -> dict[str, ast.FunctionDef]:
    """The functions at these places of a module, and those of the classes there."""
    found = {place: definition.node for place in places if (definition := module.find(place))}
    for name, owner in list(found.items()):
        if isinstance(owner, ast.ClassDef):
            found |= {f"{name}.{node.name}": node for node in owner.body if isinstance(node, ast.FunctionDef)}
    return {name: node for name, node in found.items() if isinstance(node, ast.FunctionDef)}


def _lines(node: ast.FunctionDef) -> Lines:
    return first_line(node), cast(int, node.end_lineno)


def _inside(module: ModuleSource, node: ast.FunctionDef, edits: list[Edit]) -> list[Edit]:
    """The edits in the lines of a function, and directly below them."""
    first, last = _lines(node)
    return [edit for edit in edits if module.starts[first] < edit.start and edit.end <= module.starts[last + 1]]


def _require_methods_below(module: ModuleSource, node: ast.FunctionDef, edits: list[Edit]) -> None:
    """Raise `EngineError` where edits add something other than methods directly below a function."""
    _, last = _lines(node)
    for edit in edits:
        text = edit.text.lstrip("\n")
        is_inside = edit.start < module.starts[last + 1] or text[: node.col_offset + 1].isspace()
        if is_inside:
            continue
        kinds = {type(part) for part in ast.parse(textwrap.dedent(text)).body}
        if not node.col_offset or kinds != {ast.FunctionDef}:
            raise EngineError(f"the edits add something other than methods below {node.name} in {module.path}")


def _new_lines(module: ModuleSource, node: ast.FunctionDef, edits: list[Edit]) -> Lines:
    """The lines of a function in the patched text, with what is added directly below it."""
    first, last = _lines(node)
    more = [(edit.end, edit.text.count("\n") - module.text.count("\n", edit.start, edit.end)) for edit in edits]
    above = sum(lines for end, lines in more if end <= module.starts[first])
    return first + above, last + sum(lines for end, lines in more if end <= module.starts[last + 1])


def _new_defaults(
    module: ModuleSource, old: ast.FunctionDef, edits: list[Edit], text: str, lines: Lines
) -> tuple[object, ...]:
    """The defaults of the parameters that a function gets; where it is in the patched ``text`` say ``lines``.

    Raises `EngineError` unless these are constants, stand behind the others, and all else of its head is the same.
    """
    body, _ = module.span(old.body[0])
    if all(edit.start >= body for edit in edits):
        return ()
    above = f"class {old.name}:\n" if old.col_offset else ""
    tree = ast.parse(above + "\n".join(text.split("\n")[lines[0] - 1 : lines[1]]))
    new = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    added = new.args.defaults[len(old.args.defaults) :]
    del new.args.args[len(new.args.args) - len(added) :], new.args.defaults[len(old.args.defaults) :]
    values = [default.value for default in added if isinstance(default, ast.Constant)]
    if _head(old) != _head(new) or len(values) < len(added):
        raise EngineError(f"the edits do more to the head of {old.name} in {module.path} than add parameters")
    return tuple(values)


def _head(function: ast.FunctionDef) -> list[str]:
    return [ast.dump(node) for node in (function.args, *function.decorator_list)]


def _require_fit(module: ModuleSource, name: str, before: CodeType, after: CodeType, edits: list[Edit]) -> None:
    """Raise `EngineError` where code needs another closure than that before these edits, or a name that nobody sets."""
    if before.co_freevars != after.co_freevars:
        raise EngineError(f"the edits change the free variables of {name} in {module.path}")
    local = "co_varnames", "co_cellvars"
    known = {*vars(builtins), *_names(before, "co_names", *local), *_names(after, *local)}
    named = set().union(*(words(_NO_NAME.sub("", edit.text)) for edit in edits))
    unset = named & _names(after, "co_names") - known
    unset = unset and unset - module.global_names
    unset |= _changed_before_they_are_set(edits, _names(before, *local, "co_freevars"))
    if unset:
        raise EngineError(f"the edits read {min(unset)} in {name} of {module.path}, where nothing sets it")


def _changed_before_they_are_set(edits: Iterable[Edit], known: set[str]) -> set[str]:
    """The variables, other than ``known`` ones, of which a line of the edits makes a new value before one sets them."""
    unset = set()
    for found in filter(None, (_CHANGE.match(line) for edit in edits for line in edit.text.split("\n"))):
        if found["name"] not in known and (found["operator"] or found["name"] in words(found["value"])):
            unset.add(found["name"])
        known.add(found["name"])
    return unset


def _names(code: CodeType, *kinds: str) -> set[str]:
    return {name for part in code_parts(code) for kind in kinds for name in getattr(part, kind)}


def code_parts(code: CodeType) -> list[CodeType]:
    """A code object with those in it, and in these."""
    return [code, *(part for inner in _inner_codes(code) for part in code_parts(inner))]


Codes: TypeAlias = "dict[str, tuple[CodeType, CodeType]]"
"""By qualified name, the code of the module or class body that defines a function, and that of the function."""


def _old_codes(module: ModuleSource, functions: Mapping[str, Lines]) -> Codes:
    """As `_codes`, of the text as it is: from Python's cache where that is known to be of this text."""
    with contextlib.suppress(OSError, NotImplementedError, EngineError):
        stat = os.stat(module.path)
        data = Path(importlib.util.cache_from_source(module.path)).read_bytes()
        known = struct.pack("<4sIII", importlib.util.MAGIC_NUMBER, 0, int(stat.st_mtime) & 0xFFFFFFFF, stat.st_size)
        if module.is_file and data.startswith(known):
            return _codes_in(marshal.loads(data[len(known) :]), functions)
    return _codes(module, module.text, functions)


def _codes(module: ModuleSource, text: str, functions: Mapping[str, Lines]) -> Codes:
    """The code of the ``functions`` of a text, as in the module: how a call compiles depends on what is imported."""
    path = _PATH.format(module.name)
    with contextlib.suppress(SyntaxError, EngineError):  # lines of a string begin in the first column
        return _codes_in(compile(cut_down(text, functions), path, "exec", dont_inherit=True), functions)
    return _codes_in(compile(text, path, "exec", dont_inherit=True), functions)


def _codes_in(module: CodeType, functions: Mapping[str, Lines]) -> Codes:
    """The code, in that of a module, of the ``functions``, and of those that are added below them in their lines."""
    found: Codes = {}
    for qualname, (first, last) in functions.items():
        owner, dot, _ = qualname.rpartition(".")
        for block in [block for block in _inner_codes(module) if block.co_name == owner] if owner else [module]:
            for code in _inner_codes(block):
                if first <= code.co_firstlineno <= last and code.co_name.isidentifier():
                    found[f"{owner}{dot}{code.co_name}"] = block, code
    if missing := functions.keys() - found.keys():
        raise EngineError(f"{min(missing)} is not in the lines that it was in")
    return found


def _inner_codes(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


class Installation:
    """What has been put in place, and the means to take it back.

    ``verdicts`` are, by fix, those to apply, and those that change nothing but rest on functions as they are.
    """

    is_in_place = False

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
        self.is_in_place = True

    def _put(self, owner: Any, name: str, value: Any) -> None:
        self._set.append((owner, name, _attribute(owner, name), value))
        setattr(owner, name, value)

    def _install(self, patch: FunctionPatch, earlier: Iterable[FunctionType]) -> None:
        if patch.before is None:
            scope, made = patch.scope, dict[str, Any]()
            exec(cast(CodeType, patch.block), vars(sys.modules[patch.module]), ChainMap(made, vars(scope)))
            if "__classcell__" in made:
                made["__classcell__"].cell_contents = scope
            name = patch.qualname.rpartition(".")[2]
            self._put(scope, name, made[name])
            return
        own = [each for each in earlier if each.__module__ == patch.module and each.__code__ == patch.before]
        for function in {patch.live, *own}:
            self._put(function, "__code__", patch.after)
            if patch.defaults:
                self._put(function, "__defaults__", (*(function.__defaults__ or ()), *patch.defaults))

    def not_as_in_file(self) -> dict[str, str]:
        """The fixes whose functions are not loaded as the source has them, each with what was found."""
        found = "another package has replaced it, or the file has changed since the import"
        return {
            fix: f"{patch.qualname} of {patch.module} is not what its file says: "
            + (found if patch.module in sys.modules else "the module is not imported")
            for patch in self._patches
            if not patch.runs(patch.before)
            for fix, verdict in self._verdicts.items()
            if patch.concerns(verdict)
        }

    def is_live(self, fix: str) -> bool:
        """Whether what was put in place for a fix, or found to be as it should be, is what runs."""
        verdict = self._verdicts[fix]
        added = [value for *_, value in self._set if isinstance(value, ModuleType)]
        return all(sys.modules.get(name) in added for name in verdict.new_modules) and all(
            patch.runs(patch.after) for patch in self._patches if patch.concerns(verdict)
        )

    def revert(self) -> set[FunctionType]:
        """Take back what is still ours, each function the very objects that it had; returns the functions."""
        for owner, name, had, value in self._set:
            found = _attribute(owner, name)
            if found is value and had is None:
                delattr(owner, name)
            elif found is value:
                setattr(owner, name, had)
            if isinstance(value, ModuleType) and sys.modules.get(value.__name__) is value:
                del sys.modules[value.__name__]
        self.is_in_place = False
        return {owner for owner, *_ in self._set if isinstance(owner, FunctionType)}


def _attribute(owner: Any, name: str) -> Any:
    """What a function, class or module has under a name itself; None if nothing."""
    return getattr(owner, name) if isinstance(owner, FunctionType) else vars(owner).get(name)
