"""From edits to running code: compose the edits of all changes, compile them, put them in place, take them back.

A function is corrected by giving TransformerEngine's own function object the corrected code. Its identity, globals,
defaults, decorators, closure cells and every reference that somebody holds or has wrapped stay what they were, and a
wrapper that another tool has put around it, before or after us, is left alone.

A change that cannot be put in place is named in an `InstallationError`, with its reason: go on without it.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import importlib.machinery
import importlib.util
import inspect
import io
import linecache
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import reduce
from itertools import pairwise
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, Protocol, cast

from .source import Edit, ModuleSource, Source, first_line

_PATH = "<te_graph_fixes: {}>"
"""The name under which tracebacks and `inspect` show the corrected text of a module."""


class Change(Protocol):
    """Edits that belong together, and the modules that they import: full names, and texts."""

    @property
    def edits(self) -> tuple[Edit, ...]: ...
    @property
    def new_modules(self) -> Mapping[str, str]: ...


Changes = Mapping[str, Change]


class InstallationError(Exception):
    """Changes that cannot be put together, or in place; ``reasons`` says why, by their names."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        super().__init__("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))


def patched(source: Source, changes: Changes) -> dict[str, tuple[str, str]]:
    """The text (before, after) of every module that is changed or added ("" before); raises `InstallationError`.

    Of edits that insert at one place, that of the first name comes first.
    """
    texts = {name: ("", text) for change in changes.values() for name, text in change.new_modules.items()}
    for owner, change in changes.items():
        if taken := [name for name in change.new_modules if source.find(name)]:
            raise InstallationError({owner: f"module {taken[0]} is to be added, but {source.location} has it"})
    for name, edits in _edits_by_module(changes).items():
        module = source.module(name)
        for (edit, owner), (following, other) in pairwise(edits):
            if following.start < edit.end:
                where = f"{module.path}:{module.line_number(following.start)}"
                what = "its own edits overlap" if owner == other else f"{owner} and {other} edit the same text"
                raise InstallationError(dict.fromkeys((owner, other), f"{what} at {where}"))
        after, end = "", 0
        for edit, _ in edits:
            after += module.text[end : edit.start] + edit.text
            end = edit.end
        texts[name] = module.text, after + module.text[end:]
    return texts


def _edits_by_module(changes: Changes) -> dict[str, list[tuple[Edit, str]]]:
    """The edits of each module in their order, with the names of their changes."""
    edits = [(edit, name) for name, change in sorted(changes.items()) for edit in change.edits]
    by_module = defaultdict[str, list[tuple[Edit, str]]](list)
    for edit, name in sorted(edits, key=lambda pair: pair[0][:3]):
        by_module[edit.module].append((edit, name))
    return by_module


class FunctionPatch(NamedTuple):
    """One function of TransformerEngine, as its source has it and as it becomes by the changes of ``owners``.

    A method that is added has no code ``before``; ``maker`` defines a class of the same name with it.
    """

    module: str
    qualname: str
    before: CodeType | None
    after: CodeType
    owners: frozenset[str]
    maker: CodeType | None = None

    @property
    def live(self) -> Any:
        """The loaded function: see `loaded_function`."""
        return loaded_function(self.module, self.qualname, (self.after, self.before))

    def runs(self, code: CodeType | None) -> bool:
        """Whether what runs is ``code``, or nothing where that is None."""
        function = self.live
        return function is None if code is None else type(function) is FunctionType and function.__code__ == code


def loaded_function(module: str, qualname: str, codes: Collection[CodeType | None]) -> Any:
    """What a function's name stands for now; None if for nothing.

    Wrappers that have `__wrapped__` are followed down to a function with one of these codes, or to the innermost.
    """
    *outer, name = qualname.split(".")
    with contextlib.suppress(KeyError, AttributeError, TypeError, ValueError):  # absent, or wrapped in a circle
        scope = reduce(getattr, outer, cast(Any, sys.modules[module]))
        return inspect.unwrap(
            vars(scope).get(name), stop=lambda inner: type(inner) is FunctionType and inner.__code__ in codes
        )
    return None


def changed_since_import(source: Source, modules: Iterable[str]) -> set[str]:
    """Those of the modules in which a function is loaded from their file that is not in the file now."""
    changed = set()
    for module in modules:
        in_file = _compiled(module, source.module(module).text)
        codes = set(code_parts(in_file))
        for qualname in _functions(in_file):
            function = loaded_function(module, qualname, codes)
            live = function.__code__ if type(function) is FunctionType else None
            if live and live not in codes and live.co_filename == sys.modules[module].__file__:
                changed.add(module)
    return changed


def compile_patches(source: Source, changes: Changes) -> list[FunctionPatch]:
    """Compile the functions that the ``changes`` edit or add.

    Raises `InstallationError` unless every edit lies in the body of a function, or adds methods to a class, and the
    names that the edited functions read are set.
    """
    texts = patched(source, changes)
    return [
        patch
        for name, edits in _edits_by_module(changes).items()
        for patch in _patches(source.module(name), texts[name][1], edits)
    ]


def _patches(module: ModuleSource, text: str, edits: list[tuple[Edit, str]]) -> Iterator[FunctionPatch]:
    """The functions of a module that the edits, which lead to ``text``, change or add."""
    functions = {name: node for name, node in module.definitions.items() if isinstance(node, ast.FunctionDef)}
    by_function = defaultdict[str, list[tuple[Edit, str]]](list)
    makers: dict[str, CodeType] = {}
    for edit, owner in edits:
        names = [name for name, node in functions.items() if _is_inside(module, node, edit)]
        if not names:
            maker, names = _class_with_added_methods(module, edit, owner)
            makers |= dict.fromkeys(names, maker)
        for name in names:
            by_function[name].append((edit, owner))
    before, after = _compiled(module.name, module.text), _compiled(module.name, text)
    old, new = _functions(before), _functions(after)
    defined = {*vars(builtins), *before.co_names, *(getattr(node, "name", "") for node in module.tree.body)}
    for name, inside in by_function.items():
        code, owners = None if name in makers else old[name], frozenset(owner for _, owner in inside)
        if code and code.co_freevars != new[name].co_freevars:
            reason = f"the edits change the free variables of {name} in {module.path}"
            raise InstallationError(dict.fromkeys(owners, reason))
        if unset := min(_unset_names(code, new[name], defined), default=""):
            reason = f"the edits read {unset} in {name} of {module.path}, where nothing sets it"
            readers = {owner for edit, owner in inside if re.search(rf"\b{unset}\b", edit.text)}
            # No edit has the name where one takes away what set it: any of them may be that one.
            raise InstallationError(dict.fromkeys(readers or owners, reason))
        yield FunctionPatch(module.name, name, code, new[name], owners, makers.get(name))


def _compiled(name: str, text: str) -> CodeType:
    return compile(text, _PATH.format(name), "exec", dont_inherit=True)


def _functions(block: CodeType, owner: str = "") -> dict[str, CodeType]:
    """The functions of a module and of its classes, by qualified name."""
    functions: dict[str, CodeType] = {}
    for code in _inner_codes(block):
        is_class = not code.co_flags & inspect.CO_OPTIMIZED
        functions |= _functions(code, f"{owner}{code.co_name}.") if is_class else {owner + code.co_name: code}
    return functions


def _is_inside(module: ModuleSource, node: ast.FunctionDef, edit: Edit) -> bool:
    """Whether an edit is in the body of a function; below its last line one is if it is indented so."""
    first, end = module.starts[first_line(node.body[0])], module.starts[cast(int, node.end_lineno) + 1]
    is_indented = edit.text.lstrip("\n")[: node.col_offset + 1].isspace()
    return first <= edit.start and edit.end <= end and (edit.start < end or is_indented)


def _class_with_added_methods(module: ModuleSource, edit: Edit, owner: str) -> tuple[CodeType, list[str]]:
    """What defines a class with the methods alone that an edit adds; and their names."""
    classes = [
        node.name
        for node in module.tree.body
        if isinstance(node, ast.ClassDef)
        and module.starts[node.lineno] < edit.start <= module.starts[cast(int, node.end_lineno) + 1]
    ]
    text = textwrap.dedent(edit.text)
    added = ast.parse(text).body
    if not classes or edit.start < edit.end or {type(node) for node in added} != {ast.FunctionDef}:
        reason = f"an edit of {module.path} is not in a function, and does more than add methods to a class"
        raise InstallationError({owner: reason})
    maker = _compiled(module.name, f"class {classes[0]}:\n{textwrap.indent(text, ' ')}")
    return maker, [f"{classes[0]}.{cast(ast.FunctionDef, node).name}" for node in added]


def _unset_names(before: CodeType | None, after: CodeType, defined: set[str]) -> set[str]:
    """The names that a function reads now, and did not before, and that are not ``defined`` in its module."""
    old = defined.union(*(part.co_names for part in code_parts(before)))
    # These names are those of attributes, too. Only the instructions tell them apart, and take longer to read.
    changed = [part for part in code_parts(after) if not old.issuperset(part.co_names)]
    steps = (step for part in changed for step in dis.get_instructions(part))
    return {step.argval for step in steps if step.opname == "LOAD_GLOBAL"} - old


def code_parts(code: CodeType | None) -> list[CodeType]:
    """A code object with those in it, and in these."""
    return [code, *(part for inner in _inner_codes(code) for part in code_parts(inner))] if code else []


def _inner_codes(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


_provided: dict[str, tuple[ModuleType, ModuleType, str]] = {}
"""What was put beside TE's modules in this process, by name: the package, the module, and the text that it has run.

A module is used again, as it holds what belongs to captures: their graphs outlive an activation.
"""


@contextlib.contextmanager
def _blaming(changes: Iterable[str]) -> Iterator[None]:
    """Name the changes of a step that fails."""
    try:
        yield
    except Exception as error:
        raise InstallationError(dict.fromkeys(changes, f"{type(error).__name__}: {error}")) from error


class Installation:
    """The means to put ``changes`` in place, and to take them back; raises `InstallationError` if they do not fit."""

    is_in_place = False

    def __init__(self, source: Source, changes: Changes) -> None:
        self._changes = changes
        self._texts = patched(source, changes)
        self._patches = compile_patches(source, changes)
        self._attributes: list[tuple[Any, str, Any, Any]] = []  # what each was (None: it is new), and became

    def install(self) -> None:
        """Put all in place, or nothing: then `InstallationError` names the changes by which that failed."""
        replaced = [patch for patch in self._patches if not patch.runs(patch.before)]
        if replaced:
            reason = (
                "is not what its file says: another package has replaced it, or the file has changed since the import"
            )
            raise InstallationError(
                {name: f"{patch.qualname} of {patch.module} {reason}" for patch in replaced for name in patch.owners}
            )
        try:
            for name, (before, text) in self._texts.items():
                path = _PATH.format(name)
                linecache.cache[path] = (len(text), None, io.StringIO(text).readlines(), path)
                if not before:
                    with _blaming([owner for owner, change in self._changes.items() if name in change.new_modules]):
                        self._provide(name, text)
            for patch in self._patches:
                with _blaming(patch.owners):
                    self._install(patch)
        except BaseException:
            self.revert()
            raise
        self.is_in_place = True

    def _provide(self, name: str, text: str) -> None:
        """Add a module: the one that was there before, with its state, if its package is still the same."""
        parent, _, child = name.rpartition(".")
        package, module, executed = _provided.get(name, (None, None, ""))
        if module is None or package is not sys.modules[parent]:
            spec = importlib.machinery.ModuleSpec(name, None, origin=_PATH.format(name))
            package, module, executed = sys.modules[parent], importlib.util.module_from_spec(spec), ""
        self._put(package, child, module)
        sys.modules[name] = module
        if text != executed:
            exec(_compiled(name, text), vars(module))
            _provided[name] = package, module, text

    def _put(self, owner: Any, name: str, value: Any) -> None:
        self._attributes.append((owner, name, _attribute(owner, name), value))
        setattr(owner, name, value)

    def _install(self, patch: FunctionPatch) -> None:
        if patch.maker is None:
            self._put(patch.live, "__code__", patch.after)
            return
        made: dict[str, Any] = {}
        exec(patch.maker, vars(sys.modules[patch.module]), made)
        owner, name = patch.qualname.split(".")
        method = vars(made[owner])[name]
        getattr(method, "__func__", method).__code__ = patch.after
        self._put(getattr(sys.modules[patch.module], owner), name, method)

    def is_live(self, name: str) -> bool:
        """Whether what was put in place for a change is what runs."""
        added = [value for *_, value in self._attributes if isinstance(value, ModuleType)]
        return all(sys.modules.get(module) in added for module in self._changes[name].new_modules) and all(
            patch.runs(patch.after) for patch in self._patches if name in patch.owners
        )

    def revert(self) -> None:
        """Take back what is still ours, each function the very objects that it had."""
        for owner, name, had, value in self._attributes:
            now = _attribute(owner, name)
            if now is value and had is None:
                delattr(owner, name)
            elif now is value:
                setattr(owner, name, had)
            if isinstance(value, ModuleType) and sys.modules.get(value.__name__) is value:
                del sys.modules[value.__name__]
        self.is_in_place = False


def _attribute(owner: Any, name: str) -> Any:
    """What a function, class or module has under a name itself; None if nothing."""
    return getattr(owner, name) if isinstance(owner, FunctionType) else vars(owner).get(name)
