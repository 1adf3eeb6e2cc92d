"""From edits to running code: compose the edits of all fixes, compile what changed, put it in place, take it back.

A function is corrected by giving TransformerEngine's own function object the corrected code. Its identity, globals,
defaults, decorators, closure cells and every reference that somebody holds or has wrapped stay what they were, and a
wrapper that another tool has put around it, before or after us, is left alone.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import inspect
import io
import itertools
import linecache
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import reduce
from operator import attrgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, cast

from ..fix import Verdict
from .source import Edit, ModuleSource, Source
from .tree import first_line

_PATH = "<te_graph_fixes: {}>"
"""The name under which tracebacks and `inspect` show the corrected text of a module."""


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
    """One function of TransformerEngine, as its source has it and as it becomes.

    A method that is added has no code ``before``; ``maker`` is the code that defines it.
    """

    module: str
    qualname: str
    before: CodeType | None
    after: CodeType
    edits: Collection[Edit]
    maker: CodeType | None = None

    def concerns(self, verdict: Verdict) -> bool:
        """Whether the verdict changes the function."""
        return not set(self.edits).isdisjoint(verdict.edits)

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
        """Whether what runs is ``code``, or nothing where that is None."""
        found = self.live
        return found is None if code is None else type(found) is FunctionType and found.__code__ == code


def compile_patches(source: Source, verdicts: Mapping[str, Verdict]) -> list[FunctionPatch]:
    """Compile the functions that the ``verdicts``, by fix, change, as in their modules.

    Raises `EngineError` unless every edit lies in the body of a function, or adds methods to a class, and the names
    that the edited functions read are set.
    """
    texts = patched(source, verdicts.values())
    return [
        patch
        for name, edits in _edits(verdicts.values()).items()
        for patch in _patches(source.module(name), texts[name][1], edits)
    ]


def _patches(module: ModuleSource, text: str, edits: list[Edit]) -> list[FunctionPatch]:
    """The functions of a module that the edits, which lead to ``text``, change or add."""
    functions = {name: node for name, node in module.definitions.items() if isinstance(node, ast.FunctionDef)}
    inside = {name: [edit for edit in edits if _is_inside(module, node, edit)] for name, node in functions.items()}
    edited = {name.partition(".")[0] for name, own in inside.items() if own}
    old, new = (_compiled(module, tree, edited) for tree in (module.tree, ast.parse(text)))
    before, after = _functions(old), _functions(new)
    patches = [FunctionPatch(module.name, name, before[name], after[name], own) for name, own in inside.items() if own]
    for edit in set(edits).difference(*inside.values()):
        patches += _added_methods(module, edit, text.count("\n", 0, text.index(edit.text)))
    known = {*vars(builtins), *old.co_names, *(getattr(node, "name", "") for node in module.tree.body)}
    for patch in patches:
        _require_fit(patch, known, module.path)
    return patches


def _compiled(module: ModuleSource, tree: ast.Module, names: Collection[str] = ()) -> CodeType:
    """The code of a module less all functions and classes but those of these names, which saves a third of the time."""
    kept = [node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name in names]
    return compile(ast.Module(kept, []), _PATH.format(module.name), "exec", dont_inherit=True)


def _functions(block: CodeType, owner: str = "") -> dict[str, CodeType]:
    """The functions of a module and of its classes, by qualified name."""
    found: dict[str, CodeType] = {}
    for code in _inner_codes(block):
        is_class = not code.co_flags & inspect.CO_OPTIMIZED
        found |= _functions(code, f"{code.co_name}.") if is_class else {owner + code.co_name: code}
    return found


def _is_inside(module: ModuleSource, node: ast.FunctionDef, edit: Edit) -> bool:
    """Whether an edit is in the body of a function; below its last line one is if it is indented so."""
    first, end = module.starts[first_line(node.body[0])], module.starts[cast(int, node.end_lineno) + 1]
    is_indented = edit.text.lstrip("\n")[: node.col_offset + 1].isspace()
    return first <= edit.start and edit.end <= end and (edit.start < end or is_indented)


def _added_methods(module: ModuleSource, edit: Edit, line: int) -> Iterator[FunctionPatch]:
    """The methods that an edit adds to the class that it is in; ``line`` is the number of lines above them."""
    owners = [
        name
        for name, node in module.definitions.items()
        if isinstance(node, ast.ClassDef)
        and module.starts[node.lineno] < edit.start <= module.starts[cast(int, node.end_lineno) + 1]
    ]
    tree = ast.increment_lineno(ast.parse(textwrap.dedent(edit.text)), line)
    if not owners or edit.start < edit.end or {type(node) for node in tree.body} != {ast.FunctionDef}:
        raise EngineError(f"an edit of {module.path} is not in a function, and does more than add methods to a class")
    for node in tree.body:
        maker = _compiled(module, ast.Module([node], []), [cast(ast.FunctionDef, node).name])
        for name, code in _functions(maker).items():
            yield FunctionPatch(module.name, f"{owners[-1]}.{name}", None, code, [edit], maker)


def _require_fit(patch: FunctionPatch, known: set[str], path: str) -> None:
    """Raise `EngineError` where code needs another closure than that before, or reads a name that nobody sets."""
    if patch.before and patch.before.co_freevars != patch.after.co_freevars:
        raise EngineError(f"the edits change the free variables of {patch.qualname} in {path}")
    known = known.union(*(part.co_names for part in code_parts(patch.before)))
    for part in code_parts(patch.after):
        if new := set(part.co_names) - known:  # attributes, too
            read = {step.argval for step in dis.get_instructions(part) if step.opname == "LOAD_GLOBAL"}
            if unset := new & read:
                raise EngineError(f"the edits read {min(unset)} in {patch.qualname} of {path}, where nothing sets it")


def code_parts(code: CodeType | None) -> list[CodeType]:
    """A code object with those in it, and in these."""
    return [code, *(part for inner in _inner_codes(code) for part in code_parts(inner))] if code else []


def _inner_codes(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


_provided: dict[str, tuple[ModuleType, ModuleType, str]] = {}
"""What was put beside TE's modules in this process, by name: the package, the module, and the text that it has run.

A module is used again, as it holds what belongs to captures: their graphs outlive an activation.
"""


class Installation:
    """What has been put in place for the ``verdicts``, by fix, and the means to take it back."""

    is_in_place = False

    def __init__(self, source: Source, verdicts: Mapping[str, Verdict]) -> None:
        self._verdicts = verdicts
        self._patches = compile_patches(source, verdicts)
        self._texts = patched(source, verdicts.values())
        self._set: list[tuple[Any, str, Any, Any]] = []  # attributes: what each was (None: it is new), and became

    def install(self) -> None:
        """Put every change in place, or none: on any error what was done is taken back and the error is raised."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.revert)
            for name, (before, text) in self._texts.items():
                path = _PATH.format(name)
                linecache.cache[path] = (len(text), None, io.StringIO(text).readlines(), path)
                if not before:
                    parent, _, child = name.rpartition(".")
                    package, module, executed = _provided.get(name, (None, None, ""))
                    if module is None or package is not sys.modules[parent]:
                        package, module, executed = sys.modules[parent], ModuleType(name), ""
                        module.__package__ = parent
                    self._put(package, child, module)
                    sys.modules[name] = module
                    if text != executed:
                        exec(compile(text, path, "exec", dont_inherit=True), vars(module))
                        _provided[name] = package, module, text
            for patch in self._patches:
                self._install(patch)
            stack.pop_all()
        self.is_in_place = True

    def _put(self, owner: Any, name: str, value: Any) -> None:
        self._set.append((owner, name, _attribute(owner, name), value))
        setattr(owner, name, value)

    def _install(self, patch: FunctionPatch) -> None:
        if patch.maker:
            made: dict[str, Any] = {}
            exec(patch.maker, vars(sys.modules[patch.module]), made)
            for name, method in made.items():
                self._put(patch.scope, name, method)
        else:
            self._put(patch.live, "__code__", patch.after)

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
        """Whether what was put in place for a fix is what runs."""
        verdict = self._verdicts[fix]
        added = [value for *_, value in self._set if isinstance(value, ModuleType)]
        return all(sys.modules.get(name) in added for name in verdict.new_modules) and all(
            patch.runs(patch.after) for patch in self._patches if patch.concerns(verdict)
        )

    def revert(self) -> None:
        """Take back what is still ours, each function the very objects that it had."""
        for owner, name, had, value in self._set:
            found = _attribute(owner, name)
            if found is value and had is None:
                delattr(owner, name)
            elif found is value:
                setattr(owner, name, had)
            if isinstance(value, ModuleType) and sys.modules.get(value.__name__) is value:
                del sys.modules[value.__name__]
        self.is_in_place = False


def _attribute(owner: Any, name: str) -> Any:
    """What a function, class or module has under a name itself; None if nothing."""
    return getattr(owner, name) if isinstance(owner, FunctionType) else vars(owner).get(name)
