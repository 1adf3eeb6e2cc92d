"""Modules that the corrected source imports: they are shipped beside TransformerEngine's own, as text."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import pkgutil
from types import CodeType
from typing import cast

_NAME = "transformer_engine.pytorch._te_"


def new_module(name: str) -> dict[str, str]:
    """The ``new_modules`` of a verdict whose edits import module ``name`` of this package, which may be in a zip."""
    return {_NAME + name: cast(bytes, pkgutil.get_data(__name__, f"{name}.py")).decode()}


def compiled(full_name: str, text: str) -> CodeType | None:
    """What Python has compiled a `new_module` to, if it has that ``text`` (pytest loads plugins in its own way)."""
    name = f"{__name__}.{full_name.removeprefix(_NAME)}"
    spec = importlib.util.find_spec(name) if full_name.startswith(_NAME) else None
    loader = spec and spec.loader
    if isinstance(loader, importlib.machinery.SourceFileLoader) and loader.get_source(name) == text:
        return loader.get_code(name)
    return None
