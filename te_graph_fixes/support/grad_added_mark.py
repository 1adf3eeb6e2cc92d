"""The mark that a backward sets on a weight with a fused wgrad: ``main_grad`` has the wgrad, ``.grad`` is a dummy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def record_marks(marked: dict[Any, list[int]], graph: Any, inputs: Sequence[Any]) -> Iterator[None]:
    """Record in ``marked[graph]`` the indexes of the ``inputs`` marked by a captured backward.

    Inputs that are already marked are unmarked during the backward, and marked again afterwards.
    """
    marked_before = [tensor for tensor in inputs if getattr(tensor, "grad_added_to_main_grad", False)]
    for tensor in marked_before:
        tensor.grad_added_to_main_grad = False
    try:
        yield
    finally:
        indexes = marked.setdefault(graph, [])
        indexes.extend(i for i, tensor in enumerate(inputs) if getattr(tensor, "grad_added_to_main_grad", False))
        for tensor in marked_before:
            tensor.grad_added_to_main_grad = True
