"""From edits to running code: compose the edits of all fixes, compile what changed, put it in place, take it back.

A function is corrected by giving TransformerEngine's own function object the corrected code. Its identity, globals,
defaults, decorators, closure cells and every reference that somebody holds or has wrapped stay what they were, and a
wrapper that another tool has put around it, before or after us, is left alone.
"""

from __future__ import annotations

import ast
import copy
import inspect
import linecache
import sys
from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

from .fix import Verdict
from .source import Edit, ModuleSource, Source, split_lines, without_collections

_STATE = ("__code__", "__defaults__", "__kwdefaults__")
"""What a correction may change about a function."""


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
    """One function of TransformerEngine, as it was and as it becomes; None where there is none.

    What it was is known where its module is imported: elsewhere there is nothing to compare with it. ``block`` is the
    code of the module or class body that holds just this definition; None where there are no edits.
    """

    module: str
    qualname: str
    before: CodeType | None
    after: CodeType | None
    block: CodeType | None = None
    edits: tuple[Edit, ...] = ()


@without_collections()
def changes(source: Source, verdicts: Mapping[str, Verdict]) -> list[Change]:
    """Compile the functions that the ``verdicts``, by fix, change or rest on, as in their modules.

    Raises `EngineError` unless every edit lies inside a function or adds functions to a class.
    """
    edits = _edits(verdicts.values()).items()
    changed = [change for name, its in edits for change in _module_changes(source.module(name), its)]
    places = {place for verdict in verdicts.values() for place in verdict.rests_on if place[0] in sys.modules}
    for name, qualname in sorted(places - {(change.module, change.qualname) for change in changed}):
        if not isinstance(source.module(name).definitions.get(qualname), ast.ClassDef):
            code = own_code(source.module(name), qualname)
            changed.append(Change(name, qualname, code, code))
    return changed


def own_code(module: ModuleSource, qualname: str) -> CodeType | None:
    """The code of a function as it is in the source; None where there is no function of that name."""
    node = module.definitions.get(qualname)
    return _inner(_block(module, qualname, node), node.name) if isinstance(node, ast.FunctionDef) else None


def _module_changes(module: ModuleSource, edits: list[Edit]) -> list[Change]:
    places: dict[tuple[str, int, int], list[Edit]] = {}
    for edit in edits:
        places.setdefault(_place(module, edit), []).append(edit)
    found = []
    for (owner, start, end), its in places.items():
        above = [edit for edit in edits if edit.end <= start and edit not in its]
        line = _apply(module.text[:start], above).count("\n") + 1
        for node in _functions(module, owner, _apply(module.text[start:end], its, start), line):
            qualname = f"{owner}.{node.name}" if owner else node.name
            old = module.definitions.get(qualname)
            before = own_code(module, qualname) if module.name in sys.modules else None
            if isinstance(old, ast.FunctionDef):
                _require_growth(module, old, node)
                _undecorate(node)
            block = _block(module, qualname, node)
            after = _inner(block, node.name)
            if before and before.co_freevars != after.co_freevars:
                raise EngineError(f"the edits change the free variables of {qualname} in {module.path}")
            found.append(Change(module.name, qualname, before, after, block, tuple(its)))
    return found


def _place(module: ModuleSource, edit: Edit) -> tuple[str, int, int]:
    """The class, or "", and the characters of the function that the edit is in, or of the place where it adds some."""
    owner = None
    for name, node in module.definitions.items():
        start = module.line_start([*node.decorator_list, node][0].lineno)
        end = module.line_start(cast(int, node.end_lineno) + 1)
        if start < edit.start and edit.end <= end:
            if isinstance(node, ast.FunctionDef) and edit.start < end:
                return name.rpartition(".")[0], start, end
            if isinstance(node, ast.ClassDef) and edit.start == edit.end:
                owner = name
    if owner is None:
        raise EngineError(f"a fix changes text of {module.path} that is not in a function, nor adds one to a class")
    return owner, edit.start, edit.end


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


def _require_growth(module: ModuleSource, old: ast.FunctionDef, new: ast.FunctionDef) -> None:
    """Raise `EngineError` unless ``new`` has what ``old`` has, and beyond it only parameters with defaults."""
    rest = copy.copy(new.args)
    added = len(rest.defaults) - len(old.args.defaults)
    if added > 0:
        rest.args, rest.defaults = rest.args[:-added], rest.defaults[:-added]
    known = {parameter.arg for parameter in old.args.kwonlyargs}
    keywords = zip(new.args.kwonlyargs, new.args.kw_defaults, strict=True)
    kept = [(parameter, default) for parameter, default in keywords if parameter.arg in known or default is None]
    rest.kwonlyargs, rest.kw_defaults = [parameter for parameter, _ in kept], [default for _, default in kept]
    before = [ast.dump(node) for node in (old.args, *old.decorator_list)]
    if before != [ast.dump(node) for node in (rest, *new.decorator_list)]:
        raise EngineError(f"the edits do more to the head of {new.name} in {module.path} than add parameters")


def _undecorate(node: ast.FunctionDef) -> None:
    """Keep the line of the decorators, where the code begins, but do not run them: TE's own object has them."""
    if node.decorator_list:
        lines = "\n" * (node.decorator_list[0].lineno - 1)
        node.decorator_list = [ast.parse(f"{lines}(lambda function: function)", mode="eval").body]


def _block(module: ModuleSource, qualname: str, node: ast.stmt) -> CodeType:
    """The code of the module, or the class, with just the function ``node``, and the imports on which calls depend."""
    owner = qualname.rpartition(".")[0]
    if owner:
        outer = cast(ast.ClassDef, ast.parse(f"class {owner}: pass").body[0])
        outer.body, node = [node], outer
    tree = ast.Module([*module.imports, node], [])
    code = compile(tree, _path(module.name), "exec", dont_inherit=True)
    return _inner(code, owner) if owner else code


def _inner(code: CodeType, name: str) -> CodeType:
    """The code of a class or function inside that of a module or class."""
    (found,) = (const for const in code.co_consts if isinstance(const, CodeType) and const.co_name == name)
    return found


def _path(module: str) -> str:
    """The name under which tracebacks and `inspect` show the corrected text of a module."""
    return f"<te_graph_fixes: {module}>"


def live_function(change: Change) -> FunctionType | None:
    """The function object that ``change`` is about, found through any wrappers; None if TE's own is not there."""

    def is_own(found: Any) -> bool:
        return type(found) is FunctionType and found.__code__ in (change.before, change.after)

    try:
        found = inspect.unwrap(_held(change), stop=is_own)
    except ValueError:  # wrappers in a circle
        return None
    return found if is_own(found) else None


def _held(change: Change) -> Any:
    """What the module, or the class itself, holds under the name of the function; None if nothing."""
    try:
        return vars(_scope(change)).get(change.qualname.rpartition(".")[2])
    except (KeyError, AttributeError, TypeError):
        return None


def _is_live(change: Change, code: CodeType | None) -> bool:
    """Whether the function has ``code``; None: whether there is nothing of its name."""
    function = live_function(change)
    return _held(change) is None if code is None else function is not None and function.__code__ == code


def _scope(change: Change) -> Any:
    """The module, or the class, that holds the function."""
    owner = change.qualname.rpartition(".")[0]
    module = sys.modules[change.module]
    return attrgetter(owner)(module) if owner else module


def _execute(change: Change) -> Any:
    """What the definition gives when it is executed in its module or class, which stays as it is."""
    scope = _scope(change)
    made: dict[str, Any] = {}
    exec(cast(CodeType, change.block), vars(sys.modules[change.module]), ChainMap(made, vars(scope)))
    if "__classcell__" in made:
        made["__classcell__"].cell_contents = scope
    return made[change.qualname.rpartition(".")[2]]


class _Correction:
    """What TransformerEngine's own function has, and what it gets: the code, and the defaults of new parameters."""

    def __init__(self, change: Change, function: FunctionType) -> None:
        made = _execute(change)
        before, after = cast(CodeType, change.before), cast(CodeType, change.after)
        self.function, self.place = function, (change.module, change.qualname)
        self._had = function.__code__, function.__defaults__, function.__kwdefaults__
        _, positional, keyword = self._had
        if after.co_argcount > before.co_argcount:
            positional = (*(positional or ()), *made.__defaults__[before.co_argcount - after.co_argcount :])
        if made.__kwdefaults__:
            keyword = {**made.__kwdefaults__, **(keyword or {})}
        self._gets = after, positional, keyword

    def make(self) -> None:
        for name, gets in zip(_STATE, self._gets, strict=True):
            setattr(self.function, name, gets)

    def revert(self) -> bool:
        """Give back the very objects that it had, where they are still ours; returns whether the code was."""
        was_live = self.function.__code__ is self._gets[0]
        for name, had, gets in zip(_STATE, self._had, self._gets, strict=True):
            if getattr(self.function, name) is gets:
                setattr(self.function, name, had)
        return was_live


class Installation:
    """What has been put in place, and the means to take it back.

    ``verdicts`` are, by fix, those to apply, and those to leave TE as it is, which rest on functions too. ``earlier``
    are functions, each with its module and qualified name, of which a reload has made new ones: somebody may hold them,
    so they are corrected as well.
    """

    def __init__(
        self,
        source: Source,
        verdicts: Mapping[str, Verdict],
        earlier: Mapping[FunctionType, tuple[str, str]] | None = None,
    ) -> None:
        self._verdicts = verdicts
        self._changes = changes(source, verdicts)
        self._texts = patched(source, verdicts.values())
        self._earlier = earlier or {}
        self._corrections: list[_Correction] = []
        self._modules: dict[str, ModuleType] = {}

    def install(self) -> None:
        """Put every change in place, or none: on any error what was done is taken back and the error is raised."""
        try:
            for name, (before, text) in self._texts.items():
                path = _path(name)
                linecache.cache[path] = (len(text), None, split_lines(text), path)
                if not before:
                    self._add(name, text)
            for change in filter(lambda change: change.edits, self._changes):
                self._install(change)
        except BaseException:
            self.revert()
            raise

    def _add(self, name: str, text: str) -> None:
        module = self._modules[name] = sys.modules[name] = ModuleType(name)
        module.__package__, _, child = name.rpartition(".")
        exec(compile(text, _path(name), "exec", dont_inherit=True), vars(module))
        setattr(sys.modules[module.__package__], child, module)

    def _install(self, change: Change) -> None:
        if change.before is None:
            setattr(_scope(change), change.qualname.rpartition(".")[2], _execute(change))
            return
        function = live_function(change)
        if function is None:
            raise EngineError(f"{change.qualname} of {change.module} was replaced while it was being corrected")
        place = change.module, change.qualname
        held = {each for each in self._earlier if self._earlier[each] == place and each.__code__ == change.before}
        for each in {function, *held}:
            self._corrections.append(_Correction(change, each))
            self._corrections[-1].make()

    def replaced(self) -> dict[str, str]:
        """The fixes whose functions are not loaded as the source has them, each with what was found."""
        return {
            fix: f"looked for {change.qualname} of {change.module} as its source has it, found that somebody has "
            "replaced it, or that the file has changed since it was imported"
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

    def revert(self) -> dict[FunctionType, tuple[str, str]]:
        """Take back, in reverse order, what is still ours; returns the functions that have their own code again."""
        restored = {each.function: each.place for each in reversed(self._corrections) if each.revert()}
        for change in self._changes:
            if change.before is None and change.after and _is_live(change, change.after):
                delattr(_scope(change), change.qualname.rpartition(".")[2])
        for name, module in self._modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
                parent, _, child = name.rpartition(".")
                if vars(sys.modules.get(parent, module)).get(child) is module:
                    delattr(sys.modules[parent], child)
        for name in self._texts:
            linecache.cache.pop(_path(name), None)
        self._corrections.clear()
        self._modules.clear()
        return restored
