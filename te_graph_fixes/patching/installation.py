"""Compose the edits of all changes, compile them, install them in running code, and revert them.

A function is fixed by replacing the code of TransformerEngine's own function object (docs/how.md gives the reasons).
`live_changes` compares the baked code in TransformerEngine's files with the code that this process runs.
"""

import ast
import contextlib
import functools
import importlib.machinery
import importlib.util
import inspect
import io
import linecache
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, cast

from .source import Edit, ModuleSource, Source, first_line


@dataclass(frozen=True, kw_only=True)
class Change:
    """Edits that belong together, with the texts of the support modules that they import, by full module name.

    ``after`` names the changes whose insertions come first at the same place.
    """

    edits: tuple[Edit, ...] = ()
    new_modules: Mapping[str, str] = field(default_factory=dict)
    after: tuple[str, ...] = ()


Changes = Mapping[str, Change]
Texts = dict[str, tuple[str, str]]


class InstallationError(Exception):
    """The error if changes conflict, or edit code outside functions. The message names the changes."""


def patched(source: Source, changes: Changes) -> Texts:
    """Return, by name, the texts of every edited or added module before ("" if it is added) and after the changes.

    Equal edits of several changes are made once. Insertions at the same place are in the order that their changes
    declare. Raise `InstallationError` for conflicts.
    """
    texts = {name: ("", text) for change in changes.values() for name, text in change.new_modules.items()}
    for name, edits in _edits_by_module(changes).items():
        module, after, end, last = source.module(name), "", 0, ""
        for edit, (owner, *_) in edits.items():
            if edit.start < end:
                raise InstallationError(f"{last} and {owner} edit the same text at {module.place(edit.start)}")
            after += module.text[end : edit.start] + edit.text
            end, last = edit.end, owner
        texts[name] = module.text, after + module.text[end:]
    return texts


def _edits_by_module(changes: Changes) -> dict[str, dict[Edit, list[str]]]:
    """Return, by module, the edits sorted by position, with the names of their changes. Equal edits become one edit."""
    declared = {name: [other for other in sorted(changes[name].after) if other in changes] for name in sorted(changes)}
    owners = defaultdict[Edit, list[str]](list)
    for name in TopologicalSorter(declared).static_order():
        for edit in changes[name].edits:
            owners[edit].append(name)
    by_module = defaultdict[str, dict[Edit, list[str]]](dict)
    for edit in sorted(owners, key=lambda edit: edit[:3]):
        by_module[edit.module][edit] = owners[edit]
    return by_module


class FunctionPatch(NamedTuple):
    """The code of one function of TransformerEngine, before and after the changes named in ``owners``.

    ``before`` is None for an added class method.
    """

    module: str
    qualname: str
    before: CodeType | None
    after: CodeType
    owners: frozenset[str]


def runs(module: str, qualname: str, code: CodeType | None) -> bool:
    """Return whether a loaded function has this code. If ``code`` is None, return whether the function is missing."""
    function = loaded_function(module, qualname, (code,))
    return function is None if code is None else type(function) is FunctionType and function.__code__ == code


def loaded_function(module: str, qualname: str, codes: Collection[CodeType | None]) -> Any:
    """Return the object that a function's name refers to now, without its wrappers, or None if it is missing.

    Follow `__wrapped__` to the first function with one of these ``codes``, or else to the innermost object.
    """
    *outer, name = qualname.split(".")
    with contextlib.suppress(KeyError, AttributeError, TypeError, ValueError):  # missing, or its wrappers form a cycle
        scope = functools.reduce(getattr, outer, cast(Any, sys.modules[module]))
        return inspect.unwrap(
            vars(scope).get(name), stop=lambda inner: type(inner) is FunctionType and inner.__code__ in codes
        )
    return None


def compile_patches(source: Source, changes: Changes) -> list[FunctionPatch]:
    """Compile the functions that the ``changes`` edit or add, and return a `FunctionPatch` for each function.

    Raise `InstallationError` for an edit that is outside the body of a function and does not add class methods.
    """
    texts, patches = patched(source, changes), []
    for name, edits in _edits_by_module(changes).items():
        module = source.module(name)
        old, new = (functions_of(compiled(name, text)) for text in texts[name])
        nodes = {key: node for key, node in module.definitions.items() if isinstance(node, ast.FunctionDef)}
        owners = defaultdict[str, set[str]](set)
        for edit, names in edits.items():
            edited = [key for key in nodes if _is_inside(module, nodes[key], edit)]
            methods = edited or [key for key in new if key not in old and _is_added(key, edit)]
            if not methods:
                problem = "is neither in a function nor adds a class method without default values"
                raise InstallationError(f"an edit of {names[0]} at {module.place(edit.start)} {problem}")
            for key in methods:
                owners[key].update(names)
        patches += [FunctionPatch(name, key, old.get(key), new[key], frozenset(owners[key])) for key in owners]
    return patches


def _path(module: str) -> str:
    """Return the name under which tracebacks and `inspect` show the fixed text of a module."""
    return f"<te_graph_fixes>/{module.replace('.', '/')}.py"


def compiled(name: str, text: str) -> CodeType:
    return compile(text, _path(name), "exec", dont_inherit=True)


def functions_of(block: CodeType, owner: str = "") -> dict[str, CodeType]:
    """Return the functions of a module and of its classes, by qualified name, or {} if there are none."""
    functions: dict[str, CodeType] = {}
    for code in (constant for constant in block.co_consts if isinstance(constant, CodeType)):
        is_class = not code.co_flags & inspect.CO_OPTIMIZED
        functions |= functions_of(code, f"{owner}{code.co_name}.") if is_class else {owner + code.co_name: code}
    return functions


def _is_inside(module: ModuleSource, node: ast.FunctionDef, edit: Edit) -> bool:
    """Return whether an edit is in a function's body. Indented text inserted right below counts as inside."""
    first, end = module.starts[first_line(node.body[0])], module.starts[cast(int, node.end_lineno) + 1]
    is_indented = edit.text.lstrip("\n")[: node.col_offset + 1].isspace()
    return first <= edit.start and edit.end <= end and (edit.start < end or is_indented)


def _is_added(qualname: str, edit: Edit) -> bool:
    """Return whether an edit adds this class method, without default values."""
    owner, _, name = qualname.rpartition(".")
    return bool(owner and re.search(rf"@classmethod\s+def {name}\([\w, ]+\):", edit.text))


_provided: dict[tuple[ModuleType, str], ModuleType] = {}
"""Each support module of this process, by its package and its name in the package.

Later installations reuse the module, because it contains the state of graphs, and graphs outlive an activation.
"""


class Installation:
    """The composition of ``changes``, which can be installed and reverted.

    The constructor compiles the changes, and raises `InstallationError` if they conflict. `install` succeeds only if no
    change is in `failing_changes`.
    """

    def __init__(self, source: Source, changes: Changes) -> None:
        self._changes = changes
        self._texts = patched(source, changes)
        self._patches = compile_patches(source, changes)
        self._attributes: list[tuple[Any, str, Any, Any]] = []  # owner, name, old value (None: missing), new value

    @property
    def texts(self) -> list[str]:
        """The texts of the edited and added modules."""
        return [after for _, after in self._texts.values()]

    def failing_changes(self) -> dict[str, str]:
        """Return a reason for each change that cannot be installed in this process, or {} if there is none.

        The support modules of a change must be importable, and the loaded functions that it edits must match their
        files.
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
            if not runs(patch.module, patch.qualname, patch.before):
                place = f"{patch.qualname} of {patch.module}"
                reason = f"another package has replaced {place}, or its file has changed since the import"
                for name in patch.owners:
                    reasons.setdefault(name, reason)
        return reasons

    def install(self) -> None:
        """Install all changes, or raise an error and install none."""
        try:
            for name, (before, text) in self._texts.items():
                if not before:
                    self._provide(name, text)
                # Tracebacks and `inspect` show this text.
                linecache.cache[_path(name)] = len(text), None, io.StringIO(text).readlines(), _path(name)
            for patch in self._patches:
                self._install(patch)
        except BaseException:
            self.revert()
            raise

    def _provide(self, name: str, text: str) -> None:
        """Add a support module. Reuse the module of an earlier installation, unless its package was imported again."""
        parent, _, child = name.rpartition(".")
        package = sys.modules[parent]
        known = _provided.get((package, child))
        spec = importlib.machinery.ModuleSpec(name, None, origin=_path(name))
        module = known or importlib.util.module_from_spec(spec)
        self._put(package, child, module)
        sys.modules[name] = module
        if not known:
            exec(compiled(name, text), vars(module))
            _provided[package, child] = module

    def _put(self, owner: Any, name: str, value: Any) -> None:
        self._attributes.append((owner, name, _attribute(owner, name), value))
        setattr(owner, name, value)

    def _install(self, patch: FunctionPatch) -> None:
        if patch.before is None:
            module, (owner, name) = sys.modules[patch.module], patch.qualname.split(".")
            self._put(getattr(module, owner), name, classmethod(FunctionType(patch.after, vars(module))))
        else:
            self._put(loaded_function(patch.module, patch.qualname, (patch.before,)), "__code__", patch.after)

    def is_live(self, name: str) -> bool:
        """Return whether the code and the support modules of a change are active."""
        added = [value for *_, value in self._attributes if isinstance(value, ModuleType)]
        return all(sys.modules.get(module) in added for module in self._changes[name].new_modules) and all(
            runs(patch.module, patch.qualname, patch.after) for patch in self._patches if name in patch.owners
        )

    def revert(self) -> None:
        """Restore every original object, unless another package has since replaced the object that was installed."""
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
    """Return an attribute of a function, class or module, or None if it is missing or inherited."""
    return getattr(owner, name) if isinstance(owner, FunctionType) else vars(owner).get(name)


Functions = Mapping[str, Collection[str]]
"""The functions that each change edits, as ``module:function``, by the name of the change."""


def changed_functions(source: Source, changes: Changes) -> dict[str, list[str]]:
    """Return the functions that each change edits or adds, as in `Functions`."""
    functions: dict[str, list[str]] = {owner: [] for owner in changes}
    for patch in compile_patches(source, changes):
        for owner in patch.owners:
            functions[owner].append(f"{patch.module}:{patch.qualname}")
    return functions


def live_changes(source: Source, changes: Functions) -> set[str]:
    """Return the names of the changes whose functions this process runs as they are in the files, or an empty set."""

    @functools.cache
    def in_file(module: str) -> Mapping[str, CodeType]:
        file = source.find(module)
        return functions_of(compiled(module, file.text)) if file else {}

    @functools.cache
    def is_live(place: str) -> bool:
        module, _, name = place.partition(":")
        code = in_file(module).get(name)
        return code is not None and runs(module, name, code)

    return {name for name, functions in changes.items() if functions and all(map(is_live, functions))}
