"""Programs that train through graphs and eagerly, each a function with its expected outcome.

``python -m tests.simulator -m tests.programs [MODULE ...]`` runs the programs of the modules in this folder, by default
of all, and prints their outcomes. A program gets a function ``capture``, which takes the arguments of
`make_graphed_callables` and returns graphs, or in eager training the modules themselves, once for each sample. It
yields the tensors that must be equal.

Programs that can be composed of options are in tests/verify/cases.py, because they also run on GPUs, and random ones in
tests/explore. Programs that compare something else than tensors are in the test that runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

Capture = Callable[..., Any]
Program = Callable[[Capture], Iterator[torch.Tensor | None]]
PROGRAMS: dict[str, tuple[Program, str]] = {}
"""Every program by its name, with its outcome: ``equal``, or a part of the error that it must raise."""


def program(function: Program) -> Program:
    """Register a program whose tensors are equal."""
    PROGRAMS[function.__name__] = function, "equal"
    return function


def tensors(function: Program, graphed: bool) -> list[torch.Tensor | None]:
    """Return copies of all tensors that a program yields."""

    def capture(modules: Any, samples: Any, **options: Any) -> Any:
        captured = modules
        if graphed:
            captured = te.make_graphed_callables(modules, samples, **options)
        elif isinstance(modules, tuple):
            captured = modules * (len(samples) // len(modules))
        torch.manual_seed(2)
        return captured

    FP8GlobalStateManager.reset()
    torch.manual_seed(1)
    return [tensor if tensor is None else tensor.detach().clone() for tensor in function(capture)]


def outcome(function: Program) -> str:
    """Return ``equal``, the number of tensors that differ, or the error that was raised."""
    try:
        graphed = tensors(function, graphed=True)
        pairs = [*zip(graphed, tensors(function, graphed=False), strict=True)]
    except Exception as error:
        return " ".join(str(error).split())
    differing = sum(a is not b if a is None or b is None else not torch.equal(a, b) for a, b in pairs)
    return f"{differing} of {len(pairs)} tensors differ" if differing else "equal"
