"""Programs that train with graphs and eagerly. Each is a function with an expected outcome.

``python -m tests.simulator -m tests.programs [MODULE ...]`` runs the programs of the named modules of this folder (by
default, of all modules), and prints their outcomes. A program is called with a function ``capture``, which takes the
arguments of `make_graphed_callables`. ``capture`` returns graphs or, in eager training, the modules themselves (a tuple
of modules once for each sample). The tensors that a program yields must be equal with graphs and in eager training.

Programs that consist of options are in tests/verify/cases.py, because they also run on GPUs. Random programs are in
tests/explore. A program that compares anything but tensors is in the test that runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.distributed import activation_recompute_forward
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

Capture = Callable[..., Any]
Program = Callable[[Capture], Iterator[torch.Tensor | None]]
PROGRAMS: dict[str, tuple[Program, str]] = {}
"""Every program by its name, with its expected outcome: ``equal``, or a part of the error that it must raise."""


def program(function: Program) -> Program:
    """Register a program whose tensors must be equal with graphs and eagerly. Return the program."""
    PROGRAMS[function.__name__] = function, "equal"
    return function


def tensors(function: Program, graphed: bool) -> list[torch.Tensor | None]:
    """Run a program with graphs or eagerly, and return copies of all tensors that it yields."""

    def capture(modules: Any, samples: Any, **options: Any) -> Any:
        captured = modules
        if graphed:
            captured = te.make_graphed_callables(modules, samples, **options)
        elif isinstance(modules, tuple):
            captured = modules * (len(samples) // len(modules))
        torch.manual_seed(2)
        return captured

    FP8GlobalStateManager.reset()
    # TE's reset() keeps flags left by checkpoints without a backward, which checkpoints of this program would use.
    activation_recompute_forward._is_first_fp8_module = []
    torch.manual_seed(1)
    return [tensor if tensor is None else tensor.detach().clone() for tensor in function(capture)]


def outcome(function: Program) -> str:
    """Run a program with graphs and eagerly. Return ``equal``, the number of differing tensors, or an error's text."""
    try:
        graphed = tensors(function, graphed=True)
        pairs = [*zip(graphed, tensors(function, graphed=False), strict=True)]
    except Exception as error:
        return " ".join(str(error).split())
    differing = sum(a is not b if a is None or b is None else not torch.equal(a, b) for a, b in pairs)
    return f"{differing} of {len(pairs)} tensors differ" if differing else "equal"
