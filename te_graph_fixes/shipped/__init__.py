"""Modules that the corrected source imports: they are shipped beside TransformerEngine's own, as text."""

from __future__ import annotations

import pkgutil
from typing import cast

from ..source import Source, UnrecognizedError


def module_text(name: str) -> str:
    """The text of module ``name`` of this package, which may be in a zip."""
    return cast(bytes, pkgutil.get_data(__name__, f"{name}.py")).decode()


def new_module(source: Source, name: str) -> dict[str, str]:
    """The ``new_modules`` of a verdict whose edits import module ``name``; empty where ``source`` has it already."""
    full_name, text = f"transformer_engine.pytorch._te_{name}", module_text(name)
    found = source.find(full_name)
    if found is None:
        return {full_name: text}
    if found.text != text:
        raise UnrecognizedError(f"{found.path} is another version of a module that this package provides")
    return {}
