"""The code of changes that are in the files of TransformerEngine, and whether this process runs it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Collection, Mapping
from types import CodeType, FunctionType
from typing import Any

from .installation import Changes, compile_patches, compiled, functions_of, loaded_function, patched
from .source import Source


def changed_code(source: Source, changes: Changes) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the places of each change, and a digest of the code at each place.

    A place is an edited function, ``module:name``, or an added module. The digests of an added module are those of its
    functions.
    """
    texts = patched(source, changes)
    places = {name: sorted(change.new_modules) for name, change in changes.items()}
    code = {
        f"{module}:{name}": function
        for module in {module for added in places.values() for module in added}
        for name, function in functions_of(compiled(module, texts[module][1])).items()
    }
    for patch in compile_patches(source, changes, texts):
        code[f"{patch.module}:{patch.qualname}"] = patch.after
        for name in patch.owners:
            places[name].append(f"{patch.module}:{patch.qualname}")
    return places, {place: code_digest(function) for place, function in sorted(code.items())}


class CodeInFiles:
    """The code in the files of a TransformerEngine. ``digests`` is that of `changed_code`.

    Another version of Python compiles a function to another digest. Then its module is compiled here, which is slower.
    """

    def __init__(self, source: Source, digests: Mapping[str, str]) -> None:
        self._source, self._digests = source, digests
        self._compiled: dict[str, Mapping[str, CodeType]] = {}
        self._found: dict[str, bool] = {}

    def is_live(self, places: Collection[str]) -> bool:
        """Return whether this process runs the code at all ``places``; False if there are none.

        Import the added modules.
        """
        return bool(places) and all(map(self._is_live_at, places))

    def _is_live_at(self, place: str) -> bool:
        with contextlib.suppress(Exception):
            importlib.import_module(place.partition(":")[0])
        functions = [place] if ":" in place else [each for each in self._digests if each.startswith(f"{place}:")]
        return all(map(self._runs, functions))

    def _runs(self, place: str) -> bool:
        if place not in self._found:
            self._found[place] = self._is_loaded(place)
        return self._found[place]

    def _is_loaded(self, place: str) -> bool:
        module, _, name = place.partition(":")
        function = loaded_function(module, name, ())
        parts = (function.fget, function.fset, function.fdel) if isinstance(function, property) else (function,)
        codes = [part.__code__ for part in parts if type(part) is FunctionType]
        return self._digests.get(place) in [*map(code_digest, codes)] or self._in_file(module).get(name) in codes

    def _in_file(self, module: str) -> Mapping[str, CodeType]:
        if module not in self._compiled:
            file = self._source.find(module)
            self._compiled[module] = functions_of(compiled(module, file.text)) if file else {}
        return self._compiled[module]


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
    counts = value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags
    names = value.co_name, value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars
    lines = value.co_firstlineno, value.co_linetable
    return [counts, names, lines, value.co_code, _content(value.co_consts)]
