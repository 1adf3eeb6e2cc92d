"""Cases that are programs of the driver: all that they compute through graphs, against eager."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .driver import setting
from .driver.comparison import errors
from .driver.events import train
from .driver.program import Program
from .training import make_recipe, require_recomputation


def compare(**options: Any) -> dict[str, Any]:
    """Run a `Program` with these ``options``: the errors of each kind of value, by event."""
    by_kind: dict[str, list[float]] = {}
    for name, size in _errors(options).items():
        by_kind.setdefault(name.partition(": ")[2], []).append(size)
    return {"errors": by_kind}


def compare_each(programs: Mapping[str, Mapping[str, Any]], **shared: Any) -> dict[str, Any]:
    """Run several `Program`s with ``shared`` options and some of their own: the largest error of each, by its name."""
    return {"errors": {name: [max(_errors({**shared, **own}).values())] for name, own in programs.items()}}


def _errors(options: Mapping[str, Any]) -> dict[str, float]:
    program = Program(**options)
    for recipe in (program.recipe, program.other):
        make_recipe(recipe)
    if "Recomputed" in program.modules:
        require_recomputation()
    setting.use(program)
    eager = train(graphed=False)
    return errors(train(graphed=True), eager)
