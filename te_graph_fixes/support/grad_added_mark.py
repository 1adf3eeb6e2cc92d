"""The mark that a backward sets on a weight with a fused wgrad: ``main_grad`` has the wgrad, ``.grad`` is a dummy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any


@contextmanager
def record_marks(replay: Any, inputs: Sequence[Any]) -> Iterator[None]:
    """Make each replay of a captured backward mark the ``inputs`` that the backward marks in the capture.

    Inputs that are already marked are unmarked during the backward, and marked again afterwards.
    """
    marked_before = _marked(inputs)
    for tensor in marked_before:
        tensor.grad_added_to_main_grad = False
    try:
        yield
        if marked := _marked(inputs):
            replay.add("backward deliver", "mark weights", partial(_mark, marked))
    finally:
        for tensor in marked_before:
            tensor.grad_added_to_main_grad = True


def _marked(inputs: Sequence[Any]) -> list[Any]:
    return [tensor for tensor in inputs if getattr(tensor, "grad_added_to_main_grad", False)]


def _mark(tensors: Sequence[Any], _ctx: Any, gradients: Any) -> Any:
    for tensor in tensors:
        tensor.grad_added_to_main_grad = True
    return gradients
