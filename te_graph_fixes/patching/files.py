"""The code of changes that are in the files of TransformerEngine, and whether this process runs it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any

from .installation import Changes, compile_patches, compiled, functions_of, loaded_function, patched
from .source import Source

Code = Mapping[str, Mapping[str, str]]
"""The digests of the code of each change, by ``module:function`` for edited functions and those of added modules."""


def changed_code(source: Source, changes: Changes) -> dict[str, dict[str, str]]:
    """Return the digests of the code that each change edits or adds, or {} for a change without functions."""
    texts, code = patched(source, changes), dict[str, dict[str, str]]()
    added = {name: functions_of(compiled(name, after)) for name, (before, after) in texts.items() if not before}
    for owner, change in changes.items():
        functions = [(module, *each) for module in sorted(change.new_modules) for each in added[module].items()]
        code[owner] = {f"{module}:{name}": code_digest(function) for module, name, function in functions}
    for patch in compile_patches(source, changes, texts):
        for owner in sorted(patch.owners):
            code[owner][f"{patch.module}:{patch.qualname}"] = code_digest(patch.after)
    return code


def live_changes(source: Source, changes: Code) -> set[str]:
    """Import the modules that the ``changes`` add. Return the names of the changes whose code this process runs.

    Digests of code depend on the version of Python. If a digest differs, its module is compiled here, which is slower.
    """

    @functools.cache
    def in_file(module: str) -> Mapping[str, CodeType]:
        file = source.find(module)
        return functions_of(compiled(module, file.text)) if file else {}

    @functools.cache
    def is_live(place: str, wanted: str) -> bool:
        module, _, name = place.partition(":")
        with contextlib.suppress(Exception):
            importlib.import_module(module)
        function = loaded_function(module, name, ())
        parts = (function.fget, function.fset, function.fdel) if isinstance(function, property) else (function,)
        codes = [part.__code__ for part in parts if type(part) is FunctionType]
        return wanted in map(code_digest, codes) or in_file(module).get(name) in codes

    return {name for name, code in changes.items() if code and all(is_live(*each) for each in code.items())}


def code_digest(code: CodeType) -> str:
    """Return a digest of everything in a function's code except its file. All processes return the same digest."""
    return hashlib.sha256(repr(_content(code)).encode(errors="surrogatepass")).hexdigest()[:16]


def _content(value: Any) -> Any:
    if isinstance(value, tuple):
        return [*map(_content, value)]
    if isinstance(value, frozenset):
        return sorted(map(repr, value))
    if not isinstance(value, CodeType):
        return value
    names = value.co_name, value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars
    counts = value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags
    return [names, counts, value.co_firstlineno, value.co_linetable, value.co_code, _content(value.co_consts)]
