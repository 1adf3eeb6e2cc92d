"""Compare the baked code in TransformerEngine's files with the code that this process runs."""

import functools
import hashlib
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any

from .installation import Changes, compile_patches, compiled, functions_of, loaded_function
from .source import Source

Code = Mapping[str, Mapping[str, str]]
"""For the name of each change, the digests of the functions that it edits, by ``module:function``."""


def changed_code(source: Source, changes: Changes) -> dict[str, dict[str, str]]:
    """Return, for each change, the digests of the changed code of the functions that it edits, as in `Code`."""
    code: dict[str, dict[str, str]] = {owner: {} for owner in changes}
    for patch in compile_patches(source, changes):
        for owner in patch.owners:
            code[owner][f"{patch.module}:{patch.qualname}"] = code_digest(patch.after)
    return code


def live_changes(source: Source, changes: Code) -> set[str]:
    """Return the names of the changes whose functions this process runs.

    Digests depend on the version of Python. After a mismatch, the module's file is compiled to compare the code itself.
    """

    @functools.cache
    def in_file(module: str) -> Mapping[str, CodeType]:
        file = source.find(module)
        return functions_of(compiled(module, file.text)) if file else {}

    @functools.cache
    def is_live(place: str, wanted: str) -> bool:
        module, _, name = place.partition(":")
        function = loaded_function(module, name, ())
        if type(function) is not FunctionType:
            return False
        return code_digest(function.__code__) == wanted or in_file(module).get(name) == function.__code__

    return {name for name, code in changes.items() if code and all(is_live(*each) for each in code.items())}


def code_digest(code: CodeType) -> str:
    """Return a digest of a function's code without its file name. The same Python always returns the same digest."""
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
