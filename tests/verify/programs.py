"""Run programs of the driver through graphs, and compare all results with eager training."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import transformer_engine.pytorch as te
from transformer_engine.pytorch.graph import is_graph_capturing

from .cases import BLACKWELL_RECIPES
from .driver import setting
from .driver.comparison import errors
from .driver.events import train
from .driver.program import Program, Skipped

REFUSED = r"callable \d|captured with|modified by an inplace operation"
"""A pattern that matches errors of `replay-contract`, and autograd's error for an overwritten output."""


def compare(breaks: bool = False, refusal: str = "", **options: Any) -> dict[str, Any]:
    """Run a `Program` with these ``options``, eagerly and with graphs, and return the measures of a `Case`.

    ``errors`` are relative errors by kind of result, and ``wgrad_norm`` are the norm ratios of the wgrads in each step.
    A program that ``breaks`` a replay precondition may raise the corresponding error. With a ``refusal``, it must raise
    an error that matches this regular expression. If it raises the error, ``message`` is the text.
    """
    try:
        graphed, eager = _both(options)
    except (RuntimeError, ValueError) as error:
        if not re.search(refusal or (REFUSED if breaks else "$^"), str(error)):
            raise
        return {"errors": {"refused": [0.0]}, "message": str(error), "damaged": bool(is_graph_capturing())}
    by_kind: dict[str, list[float]] = {"refused": [1.0]} if refusal else {}
    for name, size in errors(graphed, eager).items():
        by_kind.setdefault(name.partition(": ")[2], []).append(size)
    norms = [_norm(graphed[name]) / _norm(eager[name]) for name in eager if name.endswith(" step: wgrads")]
    damaged = any(by_kind.get("left behind", ()))  # the next case could use state that was left behind
    return {"errors": by_kind, "wgrad_norm": norms, "damaged": damaged}


def compare_each(programs: Mapping[str, Mapping[str, Any]], **shared: Any) -> dict[str, Any]:
    """Run several `Program`s, each with the ``shared`` options and its own. Return the measures of a `Case`.

    ``errors`` has the largest error of each program. A program that this GPU or TE cannot run is skipped. If no program
    can run, the case is skipped.
    """
    largest: dict[str, list[float]] = {}
    damaged = False
    for name, own in programs.items():
        try:
            measures = compare(**{**shared, **own})
        except Skipped:
            if name == [*programs][-1] and not largest:
                raise
            continue
        largest[name] = [max(map(max, measures["errors"].values()))]
        damaged |= measures["damaged"]
    return {"errors": largest, "damaged": damaged}


def _both(options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Run a program eagerly and with graphs. Return the results with graphs, and the eager results."""
    program = Program(**options)
    setting.require(program.recipe, program.other)
    if "Recomputed" in program.modules:
        require_recomputation()
    if program.frozen and not program.input_grads and not _captures_by_backward():
        raise Skipped("TE before 2.12 refuses to capture a module without gradients")
    setting.use(program)
    try:
        eager = train(graphed=False)
    except Exception as why:
        if program.recipe not in BLACKWELL_RECIPES:
            raise
        said = " ".join(str(why).split())
        raise Skipped(f"{', '.join(program.modules)} does not support {program.recipe}: {said}") from why
    return train(graphed=True), eager


def require_recomputation() -> None:
    """Raise `Skipped` if this TE cannot capture `te.checkpoint`."""
    if not _captures_by_backward():
        raise Skipped("TE before 2.12 refuses to capture te.checkpoint")


def _captures_by_backward() -> bool:
    """Return whether captures call `torch.autograd.backward` (from TE 2.12 on) instead of `torch.autograd.grad`."""
    return hasattr(te.graph, "_none_grad_context_wrapper")


def _norm(tensors: Any) -> float:
    return math.hypot(*(float(tensor.double().norm()) for tensor in tensors if tensor is not None))
