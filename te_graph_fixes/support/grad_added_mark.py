"""The attribute ``grad_added_to_main_grad``, which a backward sets on a weight with a fused wgrad.

The attribute means that ``main_grad`` contains the wgrad, and that ``.grad`` is a dummy.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any


@contextmanager
def record_marks(replay: Any, inputs: Sequence[Any]) -> Iterator[None]:
    """Make each replay of a captured backward set the attribute on those ``inputs`` on which the capture sets it.

    An attribute that is already True is set to False for the backward of the capture, and to True again afterwards.
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
