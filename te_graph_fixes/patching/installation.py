"""Compose the edits of all changes, compile them, install them in running code, and revert them.

A function is fixed by replacing the code of TransformerEngine's own function object. The function's identity, globals,
defaults, decorators, closure cells and references do not change. Wrappers by other tools remain in place.

`Installation.failing_changes` names the changes that do not fit this process. Any `InstallationError` means that the
changes conflict. TransformerEngine is then unchanged.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.machinery
import importlib.util
import inspect
import io
import linecache
import sys
import textwrap
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from functools import reduce
from itertools import pairwise
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, Protocol, cast

from .source import Edit, ModuleSource, Source, first_line


class Change(Protocol):
    """Edits that belong together, and the texts of the support modules that they import, by module name."""

    @property
    def edits(self) -> tuple[Edit, ...]: ...
    @property
    def new_modules(self) -> Mapping[str, str]: ...


Changes = Mapping[str, Change]


class InstallationError(Exception):
    """Changes cannot be composed, compiled or installed. The message names them."""


def patched(source: Source, changes: Changes) -> dict[str, tuple[str, str]]:
    """Return the text before and after of every edited or added module ("" before: added).

    Insertions at the same place are sorted by the names of their changes. Raise `InstallationError` for conflicts.
    """
    texts = {name: ("", text) for change in changes.values() for name, text in change.new_modules.items()}
    for owner, change in changes.items():
        if taken := [name for name in change.new_modules if source.find(name)]:
            raise InstallationError(f"{owner} adds module {taken[0]}, but {source.location} has it already")
    for name, edits in _edits_by_module(changes).items():
        module = source.module(name)
        for (edit, owner), (following, other) in pairwise(edits):
            if following.start < edit.end:
                where = f"{module.path}:{module.line_number(following.start)}"
                what = f"edits of {owner} overlap" if owner == other else f"{owner} and {other} edit the same text"
                raise InstallationError(f"{what} at {where}")
        after, end = "", 0
        for edit, _ in edits:
            after += module.text[end : edit.start] + edit.text
            end = edit.end
        texts[name] = module.text, after + module.text[end:]
    return texts


def _edits_by_module(changes: Changes) -> dict[str, list[tuple[Edit, str]]]:
    """Sort the edits of each module by position, with the names of their changes."""
    edits = [(edit, name) for name, change in sorted(changes.items()) for edit in change.edits]
    by_module = defaultdict[str, list[tuple[Edit, str]]](list)
    for edit, name in sorted(edits, key=lambda pair: pair[0][:3]):
        by_module[edit.module].append((edit, name))
    return by_module


class FunctionPatch(NamedTuple):
    """The code of one function of TransformerEngine, before and after the changes of ``owners``.

    An added method has no code ``before``. Its ``maker`` defines a class of the same name with the method.
    """

    module: str
    qualname: str
    before: CodeType | None
    after: CodeType
    owners: frozenset[str]
    maker: CodeType | None = None

    @property
    def live(self) -> Any:
        """Return the loaded function: see `loaded_function`."""
        return loaded_function(self.module, self.qualname, (self.after, self.before))


def _runs(module: str, qualname: str, code: CodeType | None) -> bool:
    """Return whether a loaded function has this code, or, with None, whether the function does not exist."""
    function = loaded_function(module, qualname, (code,))
    return function is None if code is None else type(function) is FunctionType and function.__code__ == code


def loaded_function(module: str, qualname: str, codes: Collection[CodeType | None]) -> Any:
    """Return the object that a function's name refers to now, without wrappers, or None.

    Follow `__wrapped__` to a function with one of these ``codes``, or else to the innermost object.
    """
    *outer, name = qualname.split(".")
    with contextlib.suppress(KeyError, AttributeError, TypeError, ValueError):  # absent, or wrapped in a cycle
        scope = reduce(getattr, outer, cast(Any, sys.modules[module]))
        return inspect.unwrap(
            vars(scope).get(name), stop=lambda inner: type(inner) is FunctionType and inner.__code__ in codes
        )
    return None


def compile_patches(source: Source, changes: Changes) -> list[FunctionPatch]:
    """Compile the functions that the ``changes`` edit or add.

    Raise `InstallationError` for an edit that is neither in the body of a function nor adds methods to a class.
    """
    texts = patched(source, changes)
    return [
        patch
        for name, edits in _edits_by_module(changes).items()
        for patch in _patches(source.module(name), texts[name][1], edits)
    ]


def _patches(module: ModuleSource, text: str, edits: list[tuple[Edit, str]]) -> Iterator[FunctionPatch]:
    """Compile the functions that the edits change or add. ``text`` is the edited module."""
    old, new = _functions(_compiled(module.name, module.text)), _functions(_compiled(module.name, text))
    for name, (maker, inside) in _edited_functions(module, edits).items():
        owners = frozenset(owner for _, owner in inside)
        yield FunctionPatch(module.name, name, None if maker else old[name], new[name], owners, maker)


def _edited_functions(
    module: ModuleSource, edits: list[tuple[Edit, str]]
) -> dict[str, tuple[CodeType | None, list[tuple[Edit, str]]]]:
    """Group the edits of a module by the function that contains them. An added method has a ``maker``."""
    functions = {name: node for name, node in module.definitions.items() if isinstance(node, ast.FunctionDef)}
    edited: dict[str, tuple[CodeType | None, list[tuple[Edit, str]]]] = {}
    for edit, owner in edits:
        maker, names = None, [name for name, node in functions.items() if _is_inside(module, node, edit)]
        if not names:
            maker, names = _class_with_added_methods(module, edit, owner)
        for name in names:
            edited.setdefault(name, (maker, []))[1].append((edit, owner))
    return edited


def _path(module: str) -> str:
    """Return the name under which tracebacks and `inspect` show the fixed text of a module."""
    return f"<te_graph_fixes>/{module.replace('.', '/')}.py"


def _compiled(name: str, text: str) -> CodeType:
    return compile(text, _path(name), "exec", dont_inherit=True)


def _functions(block: CodeType, owner: str = "") -> dict[str, CodeType]:
    """Collect the functions of a module and of its classes, by qualified name."""
    functions: dict[str, CodeType] = {}
    for code in (constant for constant in block.co_consts if isinstance(constant, CodeType)):
        is_class = not code.co_flags & inspect.CO_OPTIMIZED
        functions |= _functions(code, f"{owner}{code.co_name}.") if is_class else {owner + code.co_name: code}
    return functions


def _is_inside(module: ModuleSource, node: ast.FunctionDef, edit: Edit) -> bool:
    """Return whether an edit is in the body of a function. Below its last line, the indent decides."""
    first, end = module.starts[first_line(node.body[0])], module.starts[cast(int, node.end_lineno) + 1]
    is_indented = edit.text.lstrip("\n")[: node.col_offset + 1].isspace()
    return first <= edit.start and edit.end <= end and (edit.start < end or is_indented)


def _class_with_added_methods(module: ModuleSource, edit: Edit, owner: str) -> tuple[CodeType, list[str]]:
    """Compile a class with only the methods that an edit adds. Return its code and the methods' names."""
    classes = [
        node.name
        for node in module.tree.body
        if isinstance(node, ast.ClassDef)
        and module.starts[node.lineno] < edit.start <= module.starts[cast(int, node.end_lineno) + 1]
    ]
    text = textwrap.dedent(edit.text)
    added = ast.parse(text).body
    if not classes or edit.start < edit.end or {type(node) for node in added} != {ast.FunctionDef}:
        where = f"{module.path}:{module.line_number(edit.start)}"
        raise InstallationError(f"an edit of {owner} at {where} is not in a function. Only methods can be added there")
    maker = _compiled(module.name, f"class {classes[0]}:\n{textwrap.indent(text, ' ')}")
    return maker, [f"{classes[0]}.{cast(ast.FunctionDef, node).name}" for node in added]


_provided: dict[str, tuple[ModuleType, ModuleType, str]] = {}
"""The support modules of this process, by name: the package, the module, and the text that it has executed.

Each is used again by a later installation, because graphs outlive an activation and the module has their state.
"""


class Installation:
    """Composes, compiles, installs and reverts ``changes``. Conflicts raise `InstallationError`.

    Only changes that are not in `failing_changes` can be installed.
    """

    def __init__(self, source: Source, changes: Changes) -> None:
        self._changes = changes
        self._texts = patched(source, changes)
        self._patches = compile_patches(source, changes)
        self._attributes: list[tuple[Any, str, Any, Any]] = []  # owner, name, old value (None: it is new), new value

    def failing_changes(self) -> dict[str, str]:
        """Return a reason for each change that cannot be installed in this process.

        The support modules of a change must be importable. The loaded functions that it edits must match their files.
        """
        reasons: dict[str, str] = {}
        for name, change in self._changes.items():
            try:
                for module, text in change.new_modules.items():
                    self._provide(module, text)
            except Exception as error:
                reasons[name] = f"a support module cannot be imported here: {type(error).__name__}: {error}"
            self.revert()
        for patch in self._patches:
            if not _runs(patch.module, patch.qualname, patch.before):
                place = f"{patch.qualname} of {patch.module}"
                reason = f"another package has replaced {place}, or its file has changed since"
                for name in patch.owners:
                    reasons.setdefault(name, reason)
        return reasons

    def install(self) -> None:
        """Install all changes, or raise an error and install none."""
        try:
            for name, (before, text) in self._texts.items():
                if not before:
                    self._provide(name, text)
                self._show(name, text)
            for patch in self._patches:
                self._install(patch)
        except BaseException:
            self.revert()
            raise

    def _provide(self, name: str, text: str) -> None:
        """Add a support module. Reuse the earlier module object, with its state, if its package is still the same."""
        parent, _, child = name.rpartition(".")
        package, module, executed = _provided.get(name, (None, None, ""))
        if module is None or package is not sys.modules[parent]:
            spec = importlib.machinery.ModuleSpec(name, cast(Any, SimpleNamespace()), origin=_path(name))
            package, module, executed = sys.modules[parent], importlib.util.module_from_spec(spec), ""
        self._put(package, child, module)
        sys.modules[name] = module
        if text != executed:
            exec(_compiled(name, text), vars(module))
            _provided[name] = package, module, text

    def _show(self, name: str, text: str) -> None:
        """Show the text in tracebacks and `inspect`. After `linecache.clearcache` they get it from the loader."""
        path, loader = _path(name), sys.modules[name].__loader__
        linecache.cache[path] = (len(text), None, io.StringIO(text).readlines(), path)
        if isinstance(loader, (SimpleNamespace, importlib.machinery.SourceFileLoader)):  # not shared by modules
            self._put(loader, "get_source", lambda _: text)

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
        getattr(method, "__func__", method).__code__ = patch.after  # with the line numbers of the whole module
        self._put(getattr(sys.modules[patch.module], owner), name, method)

    def is_live(self, name: str) -> bool:
        """Return whether the code and the support modules of a change are active."""
        added = [value for *_, value in self._attributes if isinstance(value, ModuleType)]
        return all(sys.modules.get(module) in added for module in self._changes[name].new_modules) and all(
            _runs(patch.module, patch.qualname, patch.after) for patch in self._patches if name in patch.owners
        )

    def revert(self) -> None:
        """Restore the original objects, except where another package has replaced ours."""
        for owner, name, had, value in self._attributes:
            now = _attribute(owner, name)
            if now is value and had is None:
                delattr(owner, name)
            elif now is value:
                setattr(owner, name, had)
            if isinstance(value, ModuleType) and sys.modules.get(value.__name__) is value:
                del sys.modules[value.__name__]
        self._attributes.clear()


def _attribute(owner: Any, name: str) -> Any:
    """Return an attribute of the function, class, module or loader itself (not inherited), or None."""
    return getattr(owner, name) if isinstance(owner, FunctionType) else vars(owner).get(name)
