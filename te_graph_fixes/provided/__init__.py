"""Modules that the corrected source imports: they are shipped beside TransformerEngine's own, as text."""

from __future__ import annotations

from pathlib import Path

from ..source import Source, UnrecognizedError

PLAN_MODULE = "transformer_engine.pytorch._te_graph_order"


def plan_module(source: Source) -> dict[str, str]:
    """The ``new_modules`` of a verdict whose edits import the order plan; empty where ``source`` has it already."""
    text = Path(__file__).with_name("graph_order.py").read_text(encoding="utf-8")
    found = source.find(PLAN_MODULE)
    if found is None:
        return {PLAN_MODULE: text}
    if found.text != text:
        raise UnrecognizedError(f"{found.path} is another version of a module that this package provides")
    return {}
