"""Modules that the corrected source imports: they are shipped beside TransformerEngine's own, as text."""

from __future__ import annotations

import pkgutil
from typing import cast

from ..source import Source, UnrecognizedError

PLAN_MODULE = "transformer_engine.pytorch._te_graph_order"


def module_text(name: str) -> str:
    """The text of module ``name`` of this package, which may be in a zip."""
    return cast(bytes, pkgutil.get_data(__name__, f"{name}.py")).decode()


def plan_module(source: Source) -> dict[str, str]:
    """The ``new_modules`` of a verdict whose edits import the order plan; empty where ``source`` has it already."""
    text = module_text("graph_order")
    found = source.find(PLAN_MODULE)
    if found is None:
        return {PLAN_MODULE: text}
    if found.text != text:
        raise UnrecognizedError(f"{found.path} is another version of a module that this package provides")
    return {}
